// The kernels, written once over a lane type: every instruction set's file includes this after defining its own.
//
// A lane type offers width, set, select, add, sub, mul, div, sqrt, load, and store_pair of two neighbouring registers, per dtype; each is one correctly
// rounded operation per element, so results depend neither on the width nor on where a vector starts, and the tail can run on ScalarLane.

template <class V>
struct AdamConstants {
    typename V::reg grad_scale, l2, keep, lerp, beta2, one_minus_beta2, eps, step_size;
    typename V::mask from_exp_avg;

    explicit AdamConstants(const InfinityAdamScalars& s)
        : grad_scale(V::set(s.grad_scale)),
          l2(V::set(s.l2)),
          keep(V::set(s.keep)),
          lerp(V::set(s.one_minus_beta1 < 0.5f ? s.one_minus_beta1 : -s.beta1)),
          beta2(V::set(s.beta2)),
          one_minus_beta2(V::set(s.one_minus_beta2)),
          eps(V::set(s.eps)),
          step_size(V::set(s.step_size)),
          from_exp_avg(V::uniform(s.one_minus_beta1 < 0.5f)) {}
};

constexpr int64_t kStride = 32;  // elements per turn of the loop: one cache line of a 16-bit stream, two of an fp32 one
constexpr int64_t kAhead = 256;

// Only the 16-bit streams: they advance at half speed, and the hardware lets them fall behind (5 % measured). Asking for fp32 ahead costs 10 %.
template <class Grad, class Out>
inline __attribute__((always_inline)) void prefetch(const AdamBuffers& b, int64_t i) {
    if constexpr (Grad::narrow) __builtin_prefetch(static_cast<const uint16_t*>(b.grad) + i + kAhead);
    if constexpr (Out::narrow) __builtin_prefetch(static_cast<const uint16_t*>(b.out) + i + kAhead);
}

// The update, in the order that reference.py repeats. Returns the new master.
template <class V, class Grad, bool kL2>
inline __attribute__((always_inline)) typename V::reg adam_at(const AdamBuffers& b, const AdamConstants<V>& c, int64_t i) {
    using reg = typename V::reg;
    reg p = V::load(Fp32{}, b.master + i);
    reg g = V::mul(V::load(Grad{}, static_cast<const typename Grad::type*>(b.grad) + i), c.grad_scale);
    if constexpr (kL2) g = V::add(g, V::mul(p, c.l2));
    p = V::mul(p, c.keep);

    // lerp as PyTorch has it: start from whichever end is nearer, so that beta1 = 0 gives the gradient itself.
    const reg old = V::load(Fp32{}, b.exp_avg + i);
    const reg m = V::add(V::select(c.from_exp_avg, old, g), V::mul(V::sub(g, old), c.lerp));
    const reg v = V::add(V::mul(V::load(Fp32{}, b.exp_avg_sq + i), c.beta2), V::mul(V::mul(g, c.one_minus_beta2), g));
    const reg denominator = V::add(V::sqrt(v), c.eps);
    p = V::sub(p, V::div(V::mul(m, c.step_size), denominator));

    V::store(Fp32{}, b.exp_avg + i, m);
    V::store(Fp32{}, b.exp_avg_sq + i, v);
    V::store(Fp32{}, b.master + i, p);
    return p;
}

template <class V, class Grad, class Out, bool kL2>
void adam(const AdamBuffers& buffers, const InfinityAdamScalars& scalars, int64_t begin, int64_t end) {
    const AdamBuffers b = buffers;  // a copy no store can reach, so that the addresses stay in registers
    const AdamConstants<V> c(scalars);
    int64_t i = begin;
    for (; i + kStride <= end; i += kStride) {
        prefetch<Grad, Out>(b, i);
        for (int64_t k = i; k < i + kStride; k += 2 * V::width) {
            const auto low = adam_at<V, Grad, kL2>(b, c, k);
            const auto high = adam_at<V, Grad, kL2>(b, c, k + V::width);
            if constexpr (Out::wanted) V::store_pair(Out{}, static_cast<typename Out::type*>(b.out) + k, low, high);
        }
    }
    const AdamConstants<ScalarLane> one(scalars);
    for (; i < end; ++i) {
        const float p = adam_at<ScalarLane, Grad, kL2>(b, one, i);
        if constexpr (Out::wanted) ScalarLane::store(Out{}, static_cast<typename Out::type*>(b.out) + i, p);
    }
}

// Hides a register's origin from the compiler, which would otherwise leave out the store of what was just loaded.
template <class Reg>
inline __attribute__((always_inline)) void opaque(Reg& x) {
#if defined(__x86_64__)
    __asm__ volatile("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__ volatile("" : "+w"(x));
#else
    __asm__ volatile("" : "+m"(x));
#endif
}

template <class V, class Grad, class Out>
inline __attribute__((always_inline)) void move_at(const AdamBuffers& b, int64_t i) {
    auto p = V::load(Fp32{}, b.master + i);
    auto g = V::load(Grad{}, static_cast<const typename Grad::type*>(b.grad) + i);
    auto m = V::load(Fp32{}, b.exp_avg + i);
    auto v = V::load(Fp32{}, b.exp_avg_sq + i);
    opaque(p), opaque(g), opaque(m), opaque(v);
    V::store(Fp32{}, b.exp_avg + i, m);
    V::store(Fp32{}, b.exp_avg_sq + i, v);
    V::store(Fp32{}, b.master + i, p);
    if constexpr (Out::wanted) V::store_raw(Out{}, static_cast<typename Out::type*>(b.out) + i, p);
}

template <class V, class Grad, class Out>
void move(const AdamBuffers& buffers, int64_t begin, int64_t end) {
    const AdamBuffers b = buffers;
    int64_t i = begin;
    for (; i + kStride <= end; i += kStride) {
        prefetch<Grad, Out>(b, i);
        for (int64_t k = 0; k < kStride; k += V::width) move_at<V, Grad, Out>(b, i + k);
    }
    for (; i < end; ++i) move_at<ScalarLane, Grad, Out>(b, i);
}

template <class V, class Grad, bool kFirst>
inline __attribute__((always_inline)) void accumulate_at(float* into, const void* grad, int64_t i) {
    auto g = V::load(Grad{}, static_cast<const typename Grad::type*>(grad) + i);
    if constexpr (!kFirst) g = V::add(V::load(Fp32{}, into + i), g);
    V::store(Fp32{}, into + i, g);
}

template <class V, class Grad, bool kFirst>
void accumulate(float* into, const void* grad, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + V::width <= end; i += V::width) accumulate_at<V, Grad, kFirst>(into, grad, i);
    for (; i < end; ++i) accumulate_at<ScalarLane, Grad, kFirst>(into, grad, i);
}

constexpr int kSquareLanes = 32;

// Lane k adds the squares of elements k, k + 32, k + 64 ...; each square is exact in fp64. Then lane k adds lane k + 16, then k + 8, 4, 2, 1.
template <class V, class T>
double block_squares(const typename T::type* x) {
    alignas(64) double lanes[kSquareLanes];
    V::template square_lanes<T>(x, lanes);
    for (int half = kSquareLanes / 2; half > 0; half /= 2)
        for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
}

template <class V, class T>
DoubleDouble group_squares(const void* x, int64_t begin, int64_t end) {
    using type = typename T::type;
    const type* data = static_cast<const type*>(x);
    DoubleDouble total{0.0, 0.0};
    int64_t i = begin;
    for (; i + kBlock <= end; i += kBlock) total = add(total, {block_squares<V, T>(data + i), 0.0});
    if (i < end) {  // zeros add nothing, so a short block is a whole one
        type padded[kBlock] = {};
        __builtin_memcpy(padded, data + i, static_cast<size_t>(end - i) * sizeof(type));
        total = add(total, {block_squares<V, T>(padded), 0.0});
    }
    return total;
}

#define ADAM_ROW(L2, G) {adam<Lane, G, Fp32, L2>, adam<Lane, G, Bf16, L2>, adam<Lane, G, Fp16, L2>, adam<Lane, G, NoOutput, L2>}
#define MOVE_ROW(G) {move<Lane, G, Fp32>, move<Lane, G, Bf16>, move<Lane, G, Bf16>, move<Lane, G, NoOutput>}
template <class Lane>
constexpr Kernels kernels_of() {
    return {{{ADAM_ROW(false, Fp32), ADAM_ROW(false, Bf16), ADAM_ROW(false, Fp16)}, {ADAM_ROW(true, Fp32), ADAM_ROW(true, Bf16), ADAM_ROW(true, Fp16)}},
            {MOVE_ROW(Fp32), MOVE_ROW(Bf16), MOVE_ROW(Bf16)},
            {{accumulate<Lane, Fp32, false>, accumulate<Lane, Bf16, false>, accumulate<Lane, Fp16, false>},
             {accumulate<Lane, Fp32, true>, accumulate<Lane, Bf16, true>, accumulate<Lane, Fp16, true>}},
            {group_squares<Lane, Fp32>, group_squares<Lane, Bf16>, group_squares<Lane, Fp16>}};
}
#undef ADAM_ROW
#undef MOVE_ROW

// Compares every instruction set this machine runs with the scalar body, bit by bit, on buffers that end where an overrun is seen.
//
// Built with the address and undefined-behaviour sanitizers (target check) and for 64-bit Arm under an emulator (target check-neon). Prints a digest of
// the scalar results, which is the same on every architecture.
#include "../cpu_adam.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

int failures = 0;

void expect(bool holds, const char* what, int32_t isa, int64_t n, int a = -1, int b = -1) {
    if (holds) return;
    std::printf("FAILED: %s (isa %d, n %lld, dtypes %d %d)\n", what, isa, static_cast<long long>(n), a, b);
    if (++failures > 20) std::exit(1);
}

struct Random {
    uint64_t state = 0x9e3779b97f4a7c15u;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 32);
    }
    float unit() { return static_cast<float>(next() >> 8) * 0x1p-24f; }
};

uint64_t digest = 0xcbf29ce484222325u;

void mix(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
}

// Exactly n elements on the heap, so that the address sanitizer sees the first byte outside. `skip` elements come first: an odd start.
struct Buffer {
    Buffer(int64_t n, int32_t dtype, int64_t skip) : width(dtype == INFINITY_FP32 ? 4 : 2), bytes(static_cast<size_t>(n) * width) {
        storage.resize((static_cast<size_t>(skip) * width) + bytes);
        storage.shrink_to_fit();
        data = storage.data() + static_cast<size_t>(skip) * width;
    }
    float* floats() const { return reinterpret_cast<float*>(data); }
    uint16_t* halves() const { return reinterpret_cast<uint16_t*>(data); }

    size_t width, bytes;
    std::vector<unsigned char> storage;
    unsigned char* data;
};

// Bits of a NaN are not compared: which operand's payload survives is the machine's business.
bool same_floats(const Buffer& a, const Buffer& b) {
    for (size_t i = 0; i < a.bytes / 4; ++i) {
        const float x = a.floats()[i], y = b.floats()[i];
        if (std::isnan(x) != std::isnan(y) || (!std::isnan(x) && std::memcmp(&x, &y, 4) != 0)) return false;
    }
    return true;
}

bool same_bytes(const Buffer& a, const Buffer& b) { return a.bytes == 0 || std::memcmp(a.data, b.data, a.bytes) == 0; }

void fill(Buffer& b, int32_t dtype, Random& random, float scale, bool positive = false) {
    for (size_t i = 0; i < b.bytes / b.width; ++i) {
        const float x = (random.unit() - (positive ? 0.0f : 0.5f)) * scale;
        if (dtype == INFINITY_FP32) {
            b.floats()[i] = x;
        } else {  // any pattern of a finite number will do
            const uint32_t bits = random.next();
            b.halves()[i] = static_cast<uint16_t>(dtype == INFINITY_BF16 ? (bits & 0x8fff) | 0x3000 : bits & 0xbfff);
        }
    }
}

struct State {
    State(int64_t n, int32_t grad_dtype, int32_t out_dtype, int64_t skip)
        : master(n, INFINITY_FP32, skip),
          exp_avg(n, INFINITY_FP32, skip + 1),
          exp_avg_sq(n, INFINITY_FP32, skip + 2),
          grad(n, grad_dtype, skip + 3),
          out(out_dtype == INFINITY_NO_OUTPUT ? 0 : n, out_dtype == INFINITY_NO_OUTPUT ? INFINITY_FP32 : out_dtype, skip) {
        Random random;
        fill(master, INFINITY_FP32, random, 2.0f);
        fill(exp_avg, INFINITY_FP32, random, 0.1f);
        fill(exp_avg_sq, INFINITY_FP32, random, 0.01f, true);
        fill(grad, grad_dtype, random, 1.0f);
    }
    int64_t step(int32_t isa, int32_t threads, int64_t n, int32_t grad_dtype, int32_t out_dtype, const InfinityAdamScalars& scalars) {
        return infinity_cpu_adam_step(isa, threads, n, master.floats(), exp_avg.floats(), exp_avg_sq.floats(), grad.data, grad_dtype, out.data,
                                      out_dtype, &scalars);
    }
    Buffer master, exp_avg, exp_avg_sq, grad, out;
};

InfinityAdamScalars scalars_of(bool l2, float beta1) {
    return {0.37f, l2 ? 0.1f : 0.0f, l2 ? 1.0f : 0.9999f, beta1, static_cast<float>(1.0 - static_cast<double>(beta1)), 0.999f, 0.001f, 1e-8f, 1e-3f};
}

void test_step(int32_t isa, int64_t n, int64_t skip, int32_t threads) {
    for (int32_t grad = 0; grad < INFINITY_DTYPES; ++grad)
        for (int32_t out = 0; out <= INFINITY_NO_OUTPUT; ++out)
            for (int variant = 0; variant < 4; ++variant) {
                const InfinityAdamScalars scalars = scalars_of(variant & 1, variant & 2 ? 0.9f : 0.25f);
                State want(n, grad, out, 0), got(n, grad, out, skip);
                expect(want.step(INFINITY_SCALAR, 1, n, grad, out, scalars) == 0, "scalar step", isa, n, grad, out);
                expect(got.step(isa, threads, n, grad, out, scalars) == 0, "step", isa, n, grad, out);
                expect(same_floats(want.master, got.master), "master", isa, n, grad, out);
                expect(same_floats(want.exp_avg, got.exp_avg), "exp_avg", isa, n, grad, out);
                expect(same_floats(want.exp_avg_sq, got.exp_avg_sq), "exp_avg_sq", isa, n, grad, out);
                expect(same_bytes(want.out, got.out), "copy-out", isa, n, grad, out);
                if (isa == INFINITY_SCALAR && skip == 0)
                    for (const Buffer* b : {&want.master, &want.exp_avg, &want.exp_avg_sq, &want.out}) mix(b->data, b->bytes);
                expect(infinity_cpu_adam_move(isa, threads, n, got.master.floats(), got.exp_avg.floats(), got.exp_avg_sq.floats(), got.grad.data,
                                              grad, got.out.data, out) == 0,
                       "move", isa, n, grad, out);
                expect(same_floats(want.master, got.master), "move keeps master", isa, n, grad, out);
            }
}

// Every 16-bit pattern in, and every fp32 bit pattern's upper half with the lower halves around a tie out.
void test_conversions(int32_t isa) {
    constexpr int64_t n = 1 << 16;
    for (int32_t dtype : {INFINITY_BF16, INFINITY_FP16}) {
        Buffer all(n, dtype, 0), want(n, INFINITY_FP32, 0), got(n, INFINITY_FP32, 1);
        for (int64_t i = 0; i < n; ++i) all.halves()[i] = static_cast<uint16_t>(i);
        infinity_cpu_adam_accumulate(INFINITY_SCALAR, 1, n, want.floats(), all.data, dtype, 1);
        infinity_cpu_adam_accumulate(isa, 2, n, got.floats(), all.data, dtype, 1);
        expect(same_floats(want, got), "widening", isa, n, dtype);
        if (isa == INFINITY_SCALAR)
            for (int64_t i = 0; i < n; ++i)
                if (!std::isnan(want.floats()[i])) mix(want.floats() + i, 4);

        const InfinityAdamScalars still{0.0f, 0.0f, 1.0f, 0.0f, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f};  // the master stays as it is, infinities too
        for (uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            State wanted(n, INFINITY_FP32, dtype, 0), given(n, INFINITY_FP32, dtype, 1);
            for (State* s : {&wanted, &given})
                for (int64_t i = 0; i < n; ++i) {
                    const uint32_t bits = static_cast<uint32_t>(i) << 16 | low;
                    std::memcpy(s->master.floats() + i, &bits, 4);
                    s->exp_avg.floats()[i] = s->exp_avg_sq.floats()[i] = s->grad.floats()[i] = 0.0f;
                }
            wanted.step(INFINITY_SCALAR, 1, n, INFINITY_FP32, dtype, still);
            given.step(isa, 2, n, INFINITY_FP32, dtype, still);
            expect(same_bytes(wanted.out, given.out), "narrowing", isa, n, dtype, static_cast<int>(low));
            if (isa == INFINITY_SCALAR) mix(wanted.out.data, wanted.out.bytes);
        }
    }
}

void test_sums(int32_t isa, int64_t n, int64_t skip, int32_t threads) {
    for (int32_t dtype = 0; dtype < INFINITY_DTYPES; ++dtype) {
        Random random;
        Buffer x(n, dtype, skip);
        fill(x, dtype, random, 3.0f);
        double want[2], got[2];
        int32_t want_finite, got_finite;
        infinity_cpu_adam_sum_of_squares(INFINITY_SCALAR, 1, n, x.data, dtype, &want[0], &want[1], &want_finite);
        infinity_cpu_adam_sum_of_squares(isa, threads, n, x.data, dtype, &got[0], &got[1], &got_finite);
        expect(std::memcmp(want, got, sizeof want) == 0 && want_finite && got_finite, "sum of squares", isa, n, dtype);
        if (isa == INFINITY_SCALAR && skip == 0) mix(want, sizeof want);
        if (n == 0) continue;
        for (int64_t at : {int64_t{0}, n / 2, n - 1}) {
            Buffer bad = x;
            bad.data = bad.storage.data() + static_cast<size_t>(skip) * bad.width;
            if (dtype == INFINITY_FP32) bad.floats()[at] = at ? -INFINITY : NAN;
            if (dtype == INFINITY_BF16) bad.halves()[at] = 0x7f80;
            if (dtype == INFINITY_FP16) bad.halves()[at] = 0x7c00;
            infinity_cpu_adam_sum_of_squares(isa, threads, n, bad.data, dtype, &got[0], &got[1], &got_finite);
            expect(!got_finite && !std::isfinite(got[0]) && got[1] == 0.0, "finite flag", isa, n, dtype);
        }

        Buffer wanted(n, INFINITY_FP32, 0), given(n, INFINITY_FP32, skip + 1);
        for (int32_t first : {1, 0}) {
            infinity_cpu_adam_accumulate(INFINITY_SCALAR, 1, n, wanted.floats(), x.data, dtype, first);
            infinity_cpu_adam_accumulate(isa, threads, n, given.floats(), x.data, dtype, first);
            expect(same_bytes(wanted, given), "accumulate", isa, n, dtype);
        }
    }
}

void test_refusals() {
    float x[1] = {1.0f};
    double hi, lo;
    int32_t finite;
    const InfinityAdamScalars scalars = scalars_of(false, 0.9f);
    const bool refused = infinity_cpu_adam_step(INFINITY_SCALAR, 0, 1, x, x, x, x, 0, x, 0, &scalars) < 0 &&
                         infinity_cpu_adam_step(INFINITY_SCALAR, 1, -1, x, x, x, x, 0, x, 0, &scalars) < 0 &&
                         infinity_cpu_adam_step(INFINITY_SCALAR, 1, 1, x, x, x, x, 3, x, 0, &scalars) < 0 &&
                         infinity_cpu_adam_step(INFINITY_SCALAR, 1, 1, x, x, x, x, 0, x, 4, &scalars) < 0 &&
                         infinity_cpu_adam_step(INFINITY_SCALAR, 1, 1, x, x, x, x, 0, x, 0, nullptr) < 0 &&
                         infinity_cpu_adam_step(INFINITY_ISAS, 1, 1, x, x, x, x, 0, x, 0, &scalars) < 0 &&
                         infinity_cpu_adam_accumulate(INFINITY_SCALAR, 1, 1, x, x, -1, 0) < 0 &&
                         infinity_cpu_adam_sum_of_squares(-1, 1, 1, x, 0, &hi, &lo, &finite) < 0;
    expect(refused && x[0] == 1.0f, "arguments that cannot be served", -1, 1);
}

}  // namespace

int main() {
    std::printf("isas:");
    for (int32_t isa = 0; isa < INFINITY_ISAS; ++isa) {
        if (!infinity_cpu_adam_supports(isa)) continue;
        std::printf(" %d", isa);
        for (int64_t n : {0, 1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 127, 257})
            for (int64_t skip : {0, 1, 3}) test_step(isa, n, skip, 1);
        for (int32_t threads : {1, 2, 3}) test_step(isa, (1 << 16) + 1029, threads, threads);
        for (int64_t n : {0, 1, 31, 33, 1023, 1024, 1025, 65535, 65537, 200003})
            for (int32_t threads : {1, 2, 3}) test_sums(isa, n, threads - 1, threads);
        test_conversions(isa);
    }
    test_refusals();
    std::printf("\ndigest %016llx\n%s\n", static_cast<unsigned long long>(digest), failures ? "FAILED" : "passed");
    return failures != 0;
}

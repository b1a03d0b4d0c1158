// One element at a time: the whole scalar instruction set, and the tail of every other one.
//
// Included inside an unnamed namespace, so that each instruction set's file compiles its own copy.

struct Fp32 {
    using type = float;
    static constexpr bool wanted = true, narrow = false;
};
struct Bf16 {
    using type = uint16_t;
    static constexpr bool wanted = true, narrow = true;
};
struct Fp16 {
    using type = uint16_t;
    static constexpr bool wanted = true, narrow = true;
};
struct NoOutput {
    using type = void;
    static constexpr bool wanted = false, narrow = false;
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

struct ScalarLane {
    using reg = float;
    using mask = bool;
    static constexpr int64_t width = 1;

    static reg set(float x) { return x; }
    static mask uniform(bool x) { return x; }
    static reg select(mask first, reg a, reg b) { return first ? a : b; }
    static reg add(reg a, reg b) { return a + b; }
    static reg sub(reg a, reg b) { return a - b; }
    static reg mul(reg a, reg b) { return a * b; }
    static reg div(reg a, reg b) { return a / b; }
    static reg sqrt(reg a) { return __builtin_sqrtf(a); }

    static reg load(Fp32, const float* p) { return *p; }
    static reg load(Bf16, const uint16_t* p) { return float_of(static_cast<uint32_t>(*p) << 16); }
    static reg load(Fp16, const uint16_t* p) {
        const uint32_t sign = (*p & 0x8000u) << 16, exponent = (*p >> 10) & 0x1fu, mantissa = *p & 0x3ffu;
        if (exponent == 0x1f) return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
        if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
        return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    }

    static void store(Fp32, float* p, reg x) { *p = x; }
    static void store(Bf16, uint16_t* p, reg x) {
        const uint32_t bits = bits_of(x);
        *p = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    static void store(Fp16, uint16_t* p, reg x) {
        const uint32_t sign = (bits_of(x) >> 16) & 0x8000u, size = bits_of(x) & 0x7fffffffu;
        if (size > 0x7f800000u) {
            *p = 0x7e00;
        } else if (size >= 0x477ff000u) {  // 65520 is half way from the largest fp16 to what would come next
            *p = static_cast<uint16_t>(sign | 0x7c00);
        } else if (size < 0x38800000u) {  // subnormal in fp16, whose spacing 2^-24 is fp32's spacing above one half: one addition rounds
            *p = static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
        } else {
            *p = static_cast<uint16_t>(sign | ((size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13));
        }
    }
    template <class Out>
    static void store_pair(Out, typename Out::type* p, reg low, reg high) {
        store(Out{}, p, low), store(Out{}, p + 1, high);
    }
    // The mover's store: as many bytes, no rounding.
    static void store_raw(Fp32, float* p, reg x) { *p = x; }
    static void store_raw(Bf16, uint16_t* p, reg x) { *p = static_cast<uint16_t>(bits_of(x)); }

    template <class T>
    static void square_lanes(const typename T::type* x, double* lanes) {
        for (int k = 0; k < 32; ++k) lanes[k] = 0.0;
        for (int64_t i = 0; i < kBlock; i += 32)
            for (int k = 0; k < 32; ++k) {
                const double wide = load(T{}, x + i + k);
                lanes[k] += wide * wide;
            }
    }
};

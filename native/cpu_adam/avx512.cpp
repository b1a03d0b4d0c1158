// Kernels for AVX-512 F and BW: 16 elements at a time.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)  // the "undefined" registers of GCC 12's own header; warned about where they are inlined
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

// To the end of the file, where templates are instantiated. The headers stay above: their inline code is shared with the other files.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw")
#endif

namespace infinity_cpu_adam {
namespace {
#include "scalar_lane.inl"

struct Avx512Lane {
    using reg = __m512;
    using mask = __mmask16;
    static constexpr int64_t width = 16;

    static reg set(float x) { return _mm512_set1_ps(x); }
    static mask uniform(bool x) { return static_cast<mask>(x ? 0xffff : 0); }
    static reg select(mask first, reg a, reg b) { return _mm512_mask_blend_ps(first, b, a); }
    static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
    static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }

    static __m256i load_16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_16(uint16_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

    static reg load(Fp32, const float* p) { return _mm512_loadu_ps(p); }
    static reg load(Bf16, const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16(p)), 16)); }
    static reg load(Fp16, const uint16_t* p) { return _mm512_cvtph_ps(load_16(p)); }

    static void store(Fp32, float* p, reg x) { _mm512_storeu_ps(p, x); }
    static void store_pair(Fp32, float* p, reg low, reg high) { store(Fp32{}, p, low), store(Fp32{}, p + width, high); }
    static void store_pair(Bf16, uint16_t* p, reg low, reg high) {
        alignas(64) static constexpr uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        _mm512_storeu_si512(p, _mm512_permutex2var_epi16(rounded(low), _mm512_load_si512(upper), rounded(high)));
    }
    static void store_pair(Fp16, uint16_t* p, reg low, reg high) { store_16(p, fp16_of(low)), store_16(p + width, fp16_of(high)); }

    // bf16 in the upper half of each element. By hand: the bf16 instruction flushes subnormals whatever the mode.
    static __m512i rounded(reg x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const mask number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
        return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    }
    static __m256i fp16_of(reg x) {
        // The one NaN this can be given narrows to 0x7e00.
        const mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const reg chosen = _mm512_mask_blend_ps(nan, x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
        return _mm512_cvtps_ph(chosen, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static void store_raw(Fp32, float* p, reg x) { _mm512_storeu_ps(p, x); }
    static void store_raw(Bf16, uint16_t* p, reg x) { store_16(p, _mm512_castsi512_si256(_mm512_castps_si512(x))); }

    template <class T>
    static void square_lanes(const typename T::type* x, double* lanes) {
        __m512d sum[4];
        for (auto& s : sum) s = _mm512_setzero_pd();
        for (int64_t i = 0; i < kBlock; i += 32)
            for (int k = 0; k < 2; ++k) {
                const reg all = load(T{}, x + i + 16 * k);
                const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
                const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(all)), high = _mm512_cvtps_pd(upper);
                sum[2 * k] = _mm512_add_pd(sum[2 * k], _mm512_mul_pd(low, low));
                sum[2 * k + 1] = _mm512_add_pd(sum[2 * k + 1], _mm512_mul_pd(high, high));
            }
        for (int k = 0; k < 4; ++k) _mm512_store_pd(lanes + 8 * k, sum[k]);
    }
};

#include "body.inl"
}  // namespace

const Kernels avx512_kernels = kernels_of<Avx512Lane>();

}  // namespace infinity_cpu_adam

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

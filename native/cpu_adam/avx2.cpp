// Kernels for AVX2 with F16C: 8 elements at a time.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

// To the end of the file, where templates are instantiated. The headers stay above: their inline code is shared with the other files.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

namespace infinity_cpu_adam {
namespace {
#include "scalar_lane.inl"

struct Avx2Lane {
    using reg = __m256;
    using mask = __m256;
    static constexpr int64_t width = 8;

    static reg set(float x) { return _mm256_set1_ps(x); }
    static mask uniform(bool x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x ? -1 : 0)); }
    static reg select(mask first, reg a, reg b) { return _mm256_blendv_ps(b, a, first); }
    static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
    static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }

    static __m128i load_16(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static void store_16(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }

    static reg load(Fp32, const float* p) { return _mm256_loadu_ps(p); }
    static reg load(Bf16, const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16)); }
    static reg load(Fp16, const uint16_t* p) { return _mm256_cvtph_ps(load_16(p)); }

    static void store(Fp32, float* p, reg x) { _mm256_storeu_ps(p, x); }
    static void store_pair(Fp32, float* p, reg low, reg high) { store(Fp32{}, p, low), store(Fp32{}, p + width, high); }
    static void store_pair(Bf16, uint16_t* p, reg low, reg high) {
        const __m256i packed = _mm256_packus_epi32(bf16_of(low), bf16_of(high));  // packs within 128-bit halves
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    static void store_pair(Fp16, uint16_t* p, reg low, reg high) { store_16(p, fp16_of(low)), store_16(p + width, fp16_of(high)); }

    static __m256i bf16_of(reg x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    }
    static __m128i fp16_of(reg x) {
        // The one NaN this can be given narrows to 0x7e00.
        const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        const __m256 chosen = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
        return _mm256_cvtps_ph(chosen, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static void store_raw(Fp32, float* p, reg x) { _mm256_storeu_ps(p, x); }
    static void store_raw(Bf16, uint16_t* p, reg x) { store_16(p, _mm256_castsi256_si128(_mm256_castps_si256(x))); }

    template <class T>
    static void square_lanes(const typename T::type* x, double* lanes) {
        __m256d sum[8];
        for (auto& s : sum) s = _mm256_setzero_pd();
        for (int64_t i = 0; i < kBlock; i += 32)
            for (int k = 0; k < 4; ++k) {
                const reg eight = load(T{}, x + i + 8 * k);
                const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(eight)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(eight, 1));
                sum[2 * k] = _mm256_add_pd(sum[2 * k], _mm256_mul_pd(low, low));
                sum[2 * k + 1] = _mm256_add_pd(sum[2 * k + 1], _mm256_mul_pd(high, high));
            }
        for (int k = 0; k < 8; ++k) _mm256_store_pd(lanes + 4 * k, sum[k]);
    }
};

#include "body.inl"
}  // namespace

const Kernels avx2_kernels = kernels_of<Avx2Lane>();

}  // namespace infinity_cpu_adam

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

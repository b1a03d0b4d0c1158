// Kernels for 64-bit Arm: 4 elements at a time.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace infinity_cpu_adam {
namespace {
#include "scalar_lane.inl"

struct NeonLane {
    using reg = float32x4_t;
    using mask = uint32x4_t;
    static constexpr int64_t width = 4;

    static reg set(float x) { return vdupq_n_f32(x); }
    static mask uniform(bool x) { return vdupq_n_u32(x ? 0xffffffffu : 0u); }
    static reg select(mask first, reg a, reg b) { return vbslq_f32(first, a, b); }
    static reg add(reg a, reg b) { return vaddq_f32(a, b); }
    static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
    static reg mul(reg a, reg b) { return vmulq_f32(a, b); }
    static reg div(reg a, reg b) { return vdivq_f32(a, b); }
    static reg sqrt(reg a) { return vsqrtq_f32(a); }

    static reg load(Fp32, const float* p) { return vld1q_f32(p); }
    static reg load(Bf16, const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static reg load(Fp16, const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

    static void store(Fp32, float* p, reg x) { vst1q_f32(p, x); }
    static void store(Bf16, uint16_t* p, reg x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
        vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0))));
    }
    static void store(Fp16, uint16_t* p, reg x) {
        // The one NaN this can be given narrows to 0x7e00.
        const reg chosen = vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
        vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(chosen)));
    }
    template <class Out>
    static void store_pair(Out, typename Out::type* p, reg low, reg high) {
        store(Out{}, p, low), store(Out{}, p + width, high);
    }
    static void store_raw(Fp32, float* p, reg x) { vst1q_f32(p, x); }
    static void store_raw(Bf16, uint16_t* p, reg x) { vst1_u16(p, vget_low_u16(vreinterpretq_u16_f32(x))); }

    template <class T>
    static void square_lanes(const typename T::type* x, double* lanes) {
        float64x2_t sum[16];
        for (auto& s : sum) s = vdupq_n_f64(0.0);
        for (int64_t i = 0; i < kBlock; i += 32)
            for (int k = 0; k < 8; ++k) {
                const reg four = load(T{}, x + i + 4 * k);
                const float64x2_t low = vcvt_f64_f32(vget_low_f32(four)), high = vcvt_high_f64_f32(four);
                sum[2 * k] = vaddq_f64(sum[2 * k], vmulq_f64(low, low));
                sum[2 * k + 1] = vaddq_f64(sum[2 * k + 1], vmulq_f64(high, high));
            }
        for (int k = 0; k < 16; ++k) vst1q_f64(lanes + 2 * k, sum[k]);
    }
};

#include "body.inl"
}  // namespace

const Kernels neon_kernels = kernels_of<NeonLane>();

}  // namespace infinity_cpu_adam
#endif

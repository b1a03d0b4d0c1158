// The C interface: checks arguments, picks the instruction set's kernels, splits the elements over threads.
#include "cpu_adam.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <limits>

#include "float_mode.h"
#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace infinity_cpu_adam {
namespace {

constexpr int64_t kOneThread = 1 << 16;  // below this, waking a second thread costs more than it saves
constexpr int64_t kGrain = 1024;         // threads meet at multiples of it, so that no cache line has two writers when buffers are aligned

bool machine_runs(int32_t isa) {
    switch (isa) {
        case INFINITY_SCALAR:
            return true;
#if defined(__x86_64__)
        case INFINITY_AVX2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        case INFINITY_AVX512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
#endif
#if defined(__aarch64__)
        case INFINITY_NEON:
            return true;
#endif
        default:
            return false;
    }
}

// Null if this machine cannot run them.
const Kernels* kernels_for(int32_t isa) {
    if (!machine_runs(isa)) return nullptr;
    switch (isa) {
#if defined(__x86_64__)
        case INFINITY_AVX2:
            return &avx2_kernels;
        case INFINITY_AVX512:
            return &avx512_kernels;
#endif
#if defined(__aarch64__)
        case INFINITY_NEON:
            return &neon_kernels;
#endif
        default:
            return &scalar_kernels;
    }
}

bool between(int32_t value, int32_t low, int32_t high) { return low <= value && value <= high; }

// Calls body(begin, end) on disjoint ranges that cover [0, n), one per thread, each starting at a multiple of grain.
template <class Body>
void split(int64_t n, int32_t threads, int64_t grain, const Body& body) {
#if defined(_OPENMP)
    const int64_t grains = (n + grain - 1) / grain, most = std::min<int64_t>(threads, grains);
    if (most > 1 && n >= kOneThread) {
#pragma omp parallel num_threads(static_cast<int>(most))
        {
            const int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
            const int64_t begin = grains * self / team * grain, end = std::min(n, grains * (self + 1) / team * grain);
            const FloatMode mode;
            body(begin, end);
        }
        return;
    }
#else
    static_cast<void>(threads), static_cast<void>(grain);
#endif
    const FloatMode mode;
    body(int64_t{0}, n);
}

}  // namespace
}  // namespace infinity_cpu_adam

using namespace infinity_cpu_adam;

EXPORT int64_t infinity_cpu_adam_supports(int32_t isa) { return kernels_for(isa) != nullptr; }

EXPORT int64_t infinity_cpu_adam_step(int32_t isa, int32_t threads, int64_t n, float* master, float* exp_avg, float* exp_avg_sq, const void* grad,
                                      int32_t grad_dtype, void* out, int32_t out_dtype, const InfinityAdamScalars* scalars) {
    const Kernels* kernels = kernels_for(isa);
    if (!kernels || threads < 1 || n < 0 || !scalars || !between(grad_dtype, 0, INFINITY_FP16) || !between(out_dtype, 0, INFINITY_NO_OUTPUT))
        return -EINVAL;
    const AdamKernel kernel = kernels->adam[scalars->l2 != 0.0f][grad_dtype][out_dtype];
    const AdamBuffers buffers{master, exp_avg, exp_avg_sq, grad, out};
    split(n, threads, kGrain, [&](int64_t begin, int64_t end) { kernel(buffers, *scalars, begin, end); });
    return 0;
}

EXPORT int64_t infinity_cpu_adam_move(int32_t isa, int32_t threads, int64_t n, float* master, float* exp_avg, float* exp_avg_sq, const void* grad,
                                      int32_t grad_dtype, void* out, int32_t out_dtype) {
    const Kernels* kernels = kernels_for(isa);
    if (!kernels || threads < 1 || n < 0 || !between(grad_dtype, 0, INFINITY_FP16) || !between(out_dtype, 0, INFINITY_NO_OUTPUT)) return -EINVAL;
    const MoveKernel kernel = kernels->move[grad_dtype][out_dtype];
    const AdamBuffers buffers{master, exp_avg, exp_avg_sq, grad, out};
    split(n, threads, kGrain, [&](int64_t begin, int64_t end) { kernel(buffers, begin, end); });
    return 0;
}

EXPORT int64_t infinity_cpu_adam_accumulate(int32_t isa, int32_t threads, int64_t n, float* into, const void* grad, int32_t grad_dtype,
                                            int32_t first) {
    const Kernels* kernels = kernels_for(isa);
    if (!kernels || threads < 1 || n < 0 || !between(grad_dtype, 0, INFINITY_FP16) || !between(first, 0, 1)) return -EINVAL;
    const AccumulateKernel kernel = kernels->accumulate[first][grad_dtype];
    split(n, threads, kGrain, [&](int64_t begin, int64_t end) { kernel(into, grad, begin, end); });
    return 0;
}

EXPORT int64_t infinity_cpu_adam_sum_of_squares(int32_t isa, int32_t threads, int64_t n, const void* x, int32_t dtype, double* hi, double* lo,
                                                int32_t* finite) {
    const Kernels* kernels = kernels_for(isa);
    if (!kernels || threads < 1 || n < 0 || !between(dtype, 0, INFINITY_FP16) || !hi || !lo || !finite) return -EINVAL;
    const SquareKernel kernel = kernels->squares[dtype];
    const FloatMode mode;
    DoubleDouble total{0.0, 0.0};
    // Windows of 256 groups keep the partial sums on the stack; the order of additions is that of one long list of groups.
    constexpr int64_t kWindow = 256 * kGroup;
    for (int64_t start = 0; start < n; start += kWindow) {
        DoubleDouble groups[kWindow / kGroup];
        const int64_t length = std::min(kWindow, n - start);
        split(length, threads, kGroup, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i += kGroup) groups[i / kGroup] = kernel(x, start + i, start + std::min(end, i + kGroup));
        });
        for (int64_t i = 0; i < length; i += kGroup) total = add(total, groups[i / kGroup]);
    }
    // No finite fp32 has a square, and no array that fits memory a sum, that overflows fp64.
    *finite = std::isfinite(total.hi);
    const double sum = total.hi + total.lo;
    if (std::isnan(total.hi)) {
        *hi = std::numeric_limits<double>::quiet_NaN();
        *lo = 0.0;
    } else if (!*finite) {
        *hi = total.hi;
        *lo = 0.0;
    } else {
        *hi = sum;
        *lo = total.lo - (sum - total.hi);
    }
    return 0;
}

// The table of kernels that each instruction set fills in.
#ifndef INFINITY_CPU_ADAM_KERNELS_H
#define INFINITY_CPU_ADAM_KERNELS_H

#include <cstdint>

#include "cpu_adam.h"

namespace infinity_cpu_adam {

constexpr int64_t kBlock = 1024;         // elements per fp64 block sum
constexpr int64_t kBlocksPerGroup = 64;  // block sums added in order before the group joins the total
constexpr int64_t kGroup = kBlock * kBlocksPerGroup;

struct AdamBuffers {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    void* out;
};

struct DoubleDouble {
    double hi, lo;
};

using AdamKernel = void (*)(const AdamBuffers&, const InfinityAdamScalars&, int64_t begin, int64_t end);
using MoveKernel = void (*)(const AdamBuffers&, int64_t begin, int64_t end);
using AccumulateKernel = void (*)(float* into, const void* grad, int64_t begin, int64_t end);
using SquareKernel = DoubleDouble (*)(const void* x, int64_t begin, int64_t end);  // at most one group

struct Kernels {
    AdamKernel adam[2][INFINITY_DTYPES][INFINITY_DTYPES + 1];  // [L2 decay][gradient][copy-out, or none]
    MoveKernel move[INFINITY_DTYPES][INFINITY_DTYPES + 1];
    AccumulateKernel accumulate[2][INFINITY_DTYPES];  // [first]
    SquareKernel squares[INFINITY_DTYPES];
};

extern const Kernels scalar_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;

// Adds b to a; the rounding error of hi goes to lo. Static: an inline function's one copy could be the one compiled for AVX-512.
static inline DoubleDouble add(DoubleDouble a, DoubleDouble b) {
    const double sum = a.hi + b.hi;
    const double part = sum - a.hi;
    const double error = (a.hi - (sum - part)) + (b.hi - part);
    return {sum, a.lo + (error + b.lo)};
}

}  // namespace infinity_cpu_adam

#endif

// The C interface of the CPU optimizer kernels.
//
// Every function is stateless: hyper-parameters, thread count and instruction set come with each call. Buffers hold n elements, may start at any
// element (no alignment beyond the element's own) and must not overlap. Every function returns 0, or -EINVAL for an argument it cannot serve.
//
// The numerics are a contract, and infinity/_native/reference.py states the same contract in PyTorch:
//  * fp32 arithmetic is made of single multiplications, additions, subtractions, divisions and square roots, each rounded to nearest even, in the one
//    order written in body.inl. No fused multiply-add: the kernels wait for memory, so it would gain nothing, and without it every instruction set and
//    plain eager PyTorch give the same bits.
//  * Subnormal numbers are kept, whatever the calling thread's floating-point mode is.
//  * Narrowing to bf16 and fp16 rounds to nearest even and overflows to infinity, as PyTorch's .to() does. A NaN becomes 0x7fc0 or 0x7e00: PyTorch's
//    choice depends on the machine and on the element's position.
//  * The payload and sign of a NaN in an fp32 buffer are not specified.
#ifndef INFINITY_CPU_ADAM_H
#define INFINITY_CPU_ADAM_H

#include <cstdint>

extern "C" {

enum InfinityIsa : int32_t { INFINITY_SCALAR = 0, INFINITY_AVX2 = 1, INFINITY_AVX512 = 2, INFINITY_NEON = 3, INFINITY_ISAS = 4 };

enum InfinityDtype : int32_t { INFINITY_FP32 = 0, INFINITY_BF16 = 1, INFINITY_FP16 = 2, INFINITY_DTYPES = 3, INFINITY_NO_OUTPUT = 3 };

// What one Adam step multiplies, adds and divides by: computed in double by the caller, rounded to fp32 once.
struct InfinityAdamScalars {
    float grad_scale;    // unscale and clip in one: the gradient is multiplied by it first
    float l2;            // Adam: weight decay added to the gradient, times the master; 0 leaves the step out
    float keep;          // AdamW: 1 - lr * weight_decay, multiplies the master; 1 for Adam
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;                 // eps * sqrt(1 - beta2^step)
    float step_size;           // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
};

// 1 if this machine and this build can run the kernels of `isa`, else 0.
int64_t infinity_cpu_adam_supports(int32_t isa);

// One Adam step over master, exp_avg and exp_avg_sq (fp32, updated in place) by grad; writes the new master, rounded, to out unless out_dtype is
// INFINITY_NO_OUTPUT.
int64_t infinity_cpu_adam_step(int32_t isa, int32_t threads, int64_t n, float* master, float* exp_avg, float* exp_avg_sq, const void* grad,
                               int32_t grad_dtype, void* out, int32_t out_dtype, const InfinityAdamScalars* scalars);

// into = grad if first, else into += grad.
int64_t infinity_cpu_adam_accumulate(int32_t isa, int32_t threads, int64_t n, float* into, const void* grad, int32_t grad_dtype, int32_t first);

// The sum of squares of x as hi + lo, in fp64. Blocks of 1024 elements are summed in 32 lanes and a fixed tree, 64 blocks are added in order in
// double-double, and so are the groups of 64: the result does not depend on the thread count. finite is 0 if x holds an infinity or a NaN.
int64_t infinity_cpu_adam_sum_of_squares(int32_t isa, int32_t threads, int64_t n, const void* x, int32_t dtype, double* hi, double* lo, int32_t* finite);

// Reads and writes exactly the bytes of infinity_cpu_adam_step and computes nothing: the roofline that bench/adam.py divides by. Leaves rubbish in out.
int64_t infinity_cpu_adam_move(int32_t isa, int32_t threads, int64_t n, float* master, float* exp_avg, float* exp_avg_sq, const void* grad,
                               int32_t grad_dtype, void* out, int32_t out_dtype);
}

#endif

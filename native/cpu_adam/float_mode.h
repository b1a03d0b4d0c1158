// The floating-point mode the kernels are written for: round to nearest even, subnormals kept, nothing trapped.
//
// torch.set_flush_denormal(True), or any library linked with -ffast-math, changes the mode of the calling thread. A kernel sets its own and puts the
// caller's back.
#ifndef INFINITY_CPU_ADAM_FLOAT_MODE_H
#define INFINITY_CPU_ADAM_FLOAT_MODE_H

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace infinity_cpu_adam {

class FloatMode {
  public:
    FloatMode() : saved_(read()) { write(kIeee); }
    ~FloatMode() { write(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word kIeee = 0x1f80;  // every exception masked
    static Word read() { return _mm_getcsr(); }
    static void write(Word mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kIeee = 0;
    static Word read() {
        Word mode;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void write(Word mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
    using Word = int;
    static constexpr Word kIeee = 0;
    static Word read() { return 0; }
    static void write(Word) {}
#endif
    Word saved_;
};

}  // namespace infinity_cpu_adam

#endif

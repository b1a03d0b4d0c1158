// Kernels in plain C++, for machines with none of the vector instruction sets.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace infinity_cpu_adam {
namespace {
#include "scalar_lane.inl"
#include "body.inl"
}  // namespace

const Kernels scalar_kernels = kernels_of<ScalarLane>();

}  // namespace infinity_cpu_adam

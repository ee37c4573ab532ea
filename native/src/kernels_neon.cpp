// The vector kernels for 64-bit Arm.
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace sparkle {
namespace {

constexpr int kWidth = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef std::int32_t I32 __attribute__((vector_size(16)));
typedef std::uint32_t U32 __attribute__((vector_size(16)));

inline F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }

inline I32 bytes(const std::uint8_t* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return (I32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
}

inline void eights(std::uint32_t a, std::uint32_t b, int i, U32* v) {
  v[i / 4] = U32{} + a;
  v[i / 4 + 1] = U32{} + b;
}

}  // namespace
}  // namespace sparkle

#include "kernels_simd.h"

namespace sparkle {
extern const Kernels kNeon;
const Kernels kNeon{"neon", group_sums, linear, swiglu};
}  // namespace sparkle

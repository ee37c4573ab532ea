// The vector kernels for any processor: the compiler makes of them what it can.
#include <cstdint>
#include <cstring>

namespace sparkle {
namespace {

constexpr int kWidth = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef std::int32_t I32 __attribute__((vector_size(16)));
typedef std::uint32_t U32 __attribute__((vector_size(16)));

inline F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }

inline I32 bytes(const std::uint8_t* p) { return I32{p[0], p[1], p[2], p[3]}; }

inline void eights(std::uint32_t a, std::uint32_t b, int i, U32* v) {
  v[i / 4] = U32{} + a;
  v[i / 4 + 1] = U32{} + b;
}

}  // namespace
}  // namespace sparkle

#include "kernels_simd.h"

namespace sparkle {
extern const Kernels kPortable;
const Kernels kPortable{"portable", group_sums, linear, swiglu};
}  // namespace sparkle

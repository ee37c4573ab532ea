// The vector kernels for x86 with AVX2 and FMA.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace sparkle {
namespace {

constexpr int kWidth = 8;
typedef float F32 __attribute__((vector_size(32)));
typedef std::int32_t I32 __attribute__((vector_size(32)));
typedef std::uint32_t U32 __attribute__((vector_size(32)));

inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }

inline I32 bytes(const std::uint8_t* p) {
  return (I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

inline void eights(std::uint32_t a, std::uint32_t b, int, U32* v) {
  v[0] = (U32)_mm256_blend_epi32(_mm256_set1_epi32(static_cast<int>(a)), _mm256_set1_epi32(static_cast<int>(b)), 0xF0);
}

}  // namespace
}  // namespace sparkle

#include "kernels_simd.h"

namespace sparkle {
extern const Kernels kAvx2;
const Kernels kAvx2{"avx2", group_sums, linear, swiglu};
}  // namespace sparkle

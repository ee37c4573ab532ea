// The vector kernels for x86 with AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace sparkle {
namespace {

constexpr int kWidth = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef std::int32_t I32 __attribute__((vector_size(64)));
typedef std::uint32_t U32 __attribute__((vector_size(64)));

inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }

inline I32 bytes(const std::uint8_t* p) {
  return (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void eights(std::uint32_t a, std::uint32_t b, int i, U32* v) {
  const __m512i with_a = _mm512_mask_set1_epi32((__m512i)v[0], static_cast<__mmask16>(0x0F << i), static_cast<int>(a));
  v[0] = (U32)_mm512_mask_set1_epi32(with_a, static_cast<__mmask16>(0xF0 << i), static_cast<int>(b));
}

}  // namespace
}  // namespace sparkle

#include "kernels_simd.h"

namespace sparkle {
extern const Kernels kAvx512;
const Kernels kAvx512{"avx512", group_sums, linear, swiglu};
}  // namespace sparkle

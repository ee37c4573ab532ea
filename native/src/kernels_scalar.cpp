// The scalar kernels: one product after another, in the order and with the roundings of MLX's CPU backend on x86.
//
// Compiled without contraction: a product is rounded before it is added, as MLX's build does.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace sparkle {
namespace {

float value_of(const void* from, std::size_t at, Float type) {
  if (type == Float::kF32) return static_cast<const float*>(from)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[at];
  std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  if (type == Float::kF16) word = (bits & 0x8000U) << 16 | (bits & 0x7FFFU) << 13;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return type == Float::kF16 ? value * 0x1p112F : value;
}

void group_sums(const float* x, int n, int group, float* sums) {  // part of the interface; not used here
  for (int g = 0; g < n / group; ++g) {
    sums[g] = 0;
    for (int k = 0; k < group; ++k) sums[g] += x[g * group + k];
  }
}

void linear(const QuantMatrix& m, int begin, int end, const Rows& rows, float* y, std::ptrdiff_t y_stride, float*) {
  const std::uint32_t mask = (1U << m.bits) - 1;
  for (int o = begin; o < end; ++o) {
    const std::uint8_t* w = m.w + o * m.row_bytes();
    for (int r = 0; r < rows.n; ++r) {
      float sum = 0;
      for (int g = 0, k = 0; g < m.n_groups(); ++g) {
        const std::size_t at = static_cast<std::size_t>(o) * m.n_groups() + g;
        const float scale = value_of(m.scales, at, m.float_type), bias = value_of(m.biases, at, m.float_type);
        for (const int group_end = k + m.group; k < group_end; ++k) {
          const std::size_t bit = static_cast<std::size_t>(k) * m.bits;
          std::uint32_t word = w[bit / 8];
          if (bit % 8 + m.bits > 8) word |= static_cast<std::uint32_t>(w[bit / 8 + 1]) << 8;
          const auto q = static_cast<float>(word >> (bit % 8) & mask);
          sum += rows.x[r][k] * (scale * q + bias);
        }
      }
      y[r * y_stride + o - begin] = sum;
    }
  }
}

// As MLX's vectorised exp has it, with its constants (Cephes 2 ** x); which rounds each step once.
float exp(float x) {
  if (x > 88.0F) return INFINITY;
  if (x < -88.0F) return 0;
  const float y = x * 1.442695F;
  const float whole = std::floor(y + 0.5F), rest = y - whole;
  float p = 1.535336188319500e-4F;
  for (const float c : {1.339887440266574e-3F, 9.618437357674640e-3F, 5.550332471162809e-2F, 2.402264791363012e-1F,
                        6.931472028550421e-1F, 1.0F})
    p = std::fma(p, rest, c);
  const std::int32_t power = (static_cast<std::int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return scale * p;
}

void swiglu(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    const float y = 1.0F / (1.0F + exp(std::fabs(gate[i])));
    const float sigmoid = gate[i] < 0 ? y : 1.0F - y;
    out[i] = gate[i] * sigmoid * up[i];
  }
}

}  // namespace

extern const Kernels kScalar;
const Kernels kScalar{"scalar", group_sums, linear, swiglu};
}  // namespace sparkle

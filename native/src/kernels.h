// Arithmetic of quantised weights on a CPU, in float32; chosen at run time by what the processor can do.
//
// A row of weights holds groups of `group` values of `bits` bits, packed without gaps, the first in the lowest bits;
// value q of group g stands for scale[g] * q + bias[g] (MLX's affine mode).
//
// INVARIANT: an output's bits depend on its weights and its own row of x alone, never on how many rows or outputs are
// computed with it, nor on the thread. In every group the products are added lane by lane in order, then scaled and
// added to the lanes' totals; the biases' share follows, from each group's sum of x; then the lanes are added pairwise.
// The `scalar` kernels add one product after another, scale * q + bias first: bit for bit what MLX's CPU backend does
// on x86.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sparkle {

enum class Float : std::uint8_t { kF32, kBF16, kF16 };

// n_out rows of n_in weights. Row o begins at w + o * row_bytes(), its scales and biases at o * n_groups().
struct QuantMatrix {
  const std::uint8_t* w;
  const void* scales;
  const void* biases;
  Float float_type;  // of scales and biases
  int bits, group, n_out, n_in;

  int n_groups() const { return n_in / group; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(n_in) * bits / 8; }
};

// Rows of activations: x[r] points to n_in floats, sums[r] to the sum of each group of them. Aligned as floats are.
struct Rows {
  const float* const* x;
  const float* const* sums;
  int n;
};

struct Kernels {
  const char* name;
  // sums[g] = the sum of group g of the n values at x.
  void (*group_sums)(const float* x, int n, int group, float* sums);
  // y[r][o] for every row r and begin <= o < end, at y[r * y_stride + o - begin]. `scratch`: scratch_floats(m).
  void (*linear)(const QuantMatrix& m, int begin, int end, const Rows& rows, float* y, std::ptrdiff_t y_stride,
                 float* scratch);
  // out[i] = silu(gate[i]) * up[i]; out may be gate.
  void (*swiglu)(const float* gate, const float* up, int n, float* out);
};

// Outputs that are computed at once; blocks of outputs are best a multiple of it.
constexpr int kOutputTile = 4;

inline std::size_t scratch_floats(const QuantMatrix& m) {
  return 2 * kOutputTile * static_cast<std::size_t>(m.n_groups());
}

// Throws std::invalid_argument if these kernels cannot read such a matrix.
void check(const QuantMatrix& m);

// Names of the kernels that this processor can run, the fastest first; "scalar" is the last.
std::vector<std::string> kernel_names();

// By name. Throws std::invalid_argument, listing those that can be run, for another.
const Kernels& kernels(const std::string& name);

}  // namespace sparkle

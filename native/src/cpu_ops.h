// MLX operations on the CPU backend that compute with our kernels: lazy like any other, run by the stream's thread.
#pragma once

#include <mlx/mlx.h>

#include <memory>
#include <vector>

#include "expert_stream.h"

namespace sparkle {

// x (…, n_in) float32 times the transpose of a quantised matrix (n_out, n_in): (…, n_out) float32.
// w (n_out, n_in * bits / 32) uint32, scales and biases (n_out, n_in / group_size).
// Throws std::invalid_argument for shapes or dtypes that do not fit.
mlx::core::array quantized_linear(std::shared_ptr<Processor> processor, const mlx::core::array& x,
                                  const mlx::core::array& w, const mlx::core::array& scales,
                                  const mlx::core::array& biases, int group_size, int bits);

// x (n_rows, hidden) float32; slots (n_rows, top_k) int32, all held by the caller until the result is evaluated, or -1:
// (n_rows, top_k, hidden) float32, zeros where the slot is -1.
mlx::core::array expert_mlp(std::shared_ptr<Processor> processor, std::shared_ptr<ExpertMlp> experts,
                            const mlx::core::array& x, const mlx::core::array& slots);

// The router of a later layer, asked about this layer's input: logits (…, n_experts) float32 of which the last row's `n`
// largest are a guess.
struct Forecast {
  std::uint32_t layer;
  int n;
  mlx::core::array logits;
};

// The same for experts that are looked up in the pool while the step runs, and waited for if they are not there: x
// (n_rows, hidden) float32, indices (n_rows, top_k) uint32 of `layer`, whose records have class `layout` and `n_out`
// outputs: (n_rows, top_k, n_out) float32. To be evaluated between begin and end of `stream`, whose `check` then says
// whether the result is one.
mlx::core::array streamed_mlp(std::shared_ptr<ExpertStream> stream, std::uint32_t layer, std::size_t layout, int n_out,
                              const mlx::core::array& x, const mlx::core::array& indices,
                              const std::vector<Forecast>& forecasts);

}  // namespace sparkle

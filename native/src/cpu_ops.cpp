#include "cpu_ops.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <stdexcept>

namespace mx = mlx::core;

namespace sparkle {
namespace {

Float float_type(const mx::array& a) {
  if (a.dtype() == mx::float32) return Float::kF32;
  if (a.dtype() == mx::bfloat16) return Float::kBF16;
  if (a.dtype() == mx::float16) return Float::kF16;
  throw std::invalid_argument("scales must be float32, bfloat16 or float16");
}

// What every operation here has in common: nothing is ever the same as another call, and nothing runs on a GPU.
class CpuOp : public mx::UnaryPrimitive {
 public:
  using mx::UnaryPrimitive::UnaryPrimitive;

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error(std::string(name()) + " runs on the CPU backend only");
  }
};

class QuantizedLinear : public CpuOp {
 public:
  QuantizedLinear(mx::Stream stream, std::shared_ptr<Processor> processor, QuantMatrix shape)
      : CpuOp(stream), processor_(std::move(processor)), shape_(shape) {}

  const char* name() const override { return "SparkleQuantizedLinear"; }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    QuantMatrix m = shape_;
    m.w = inputs[1].data<std::uint8_t>();
    m.scales = inputs[2].data<std::uint8_t>();
    m.biases = inputs[3].data<std::uint8_t>();
    const int n_rows = static_cast<int>(inputs[0].size() / m.n_in);
    mx::cpu::get_command_encoder(stream()).dispatch([processor = processor_, m, n_rows, x = inputs[0].data<float>(),
                                                     y = out.data<float>()] { linear(*processor, m, x, n_rows, y); });
  }

 private:
  std::shared_ptr<Processor> processor_;
  QuantMatrix shape_;
};

class ExpertMlpOp : public CpuOp {
 public:
  ExpertMlpOp(mx::Stream stream, std::shared_ptr<Processor> processor, std::shared_ptr<ExpertMlp> experts)
      : CpuOp(stream), processor_(std::move(processor)), experts_(std::move(experts)) {}

  const char* name() const override { return "SparkleExpertMlp"; }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const int n_rows = inputs[1].shape(0), top_k = inputs[1].shape(1);
    mx::cpu::get_command_encoder(stream()).dispatch([processor = processor_, experts = experts_, n_rows, top_k,
                                                     x = inputs[0].data<float>(),
                                                     slots = inputs[1].data<std::int32_t>(), y = out.data<float>()] {
      std::vector<Pair> pairs;
      for (int i = 0; i < n_rows * top_k; ++i) {
        pairs.push_back({i / top_k, i, slots[i]});
        if (slots[i] < 0) std::fill_n(y + static_cast<std::size_t>(i) * experts->hidden(), experts->hidden(), 0.0F);
      }
      experts->run(*processor, x, pairs, y);
    });
  }

 private:
  std::shared_ptr<Processor> processor_;
  std::shared_ptr<ExpertMlp> experts_;
};

class StreamedMlpOp : public CpuOp {
 public:
  // call: its pointers are not used.
  StreamedMlpOp(mx::Stream stream, std::shared_ptr<ExpertStream> experts, LayerCall call)
      : CpuOp(stream), experts_(std::move(experts)), call_(std::move(call)) {}

  const char* name() const override { return "SparkleStreamedMlp"; }

  // inputs: x, indices, and the logits of each guess.
  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    LayerCall call = call_;
    call.x = inputs[0].data<float>();
    call.indices = inputs[1].data<std::uint32_t>();
    call.out = out.data<float>();
    for (std::size_t i = 0; i < call.guesses.size(); ++i) {
      Guess& guess = call.guesses[i];
      guess.logits = inputs[2 + i].data<float>() + inputs[2 + i].size() - guess.n_experts;  // of the last row
    }
    mx::cpu::get_command_encoder(stream()).dispatch([experts = experts_, call] { experts->run(call); });
  }

 private:
  std::shared_ptr<ExpertStream> experts_;
  LayerCall call_;
};

}  // namespace

mx::array quantized_linear(std::shared_ptr<Processor> processor, const mx::array& x, const mx::array& w,
                           const mx::array& scales, const mx::array& biases, int group_size, int bits) {
  if (x.dtype() != mx::float32 || w.dtype() != mx::uint32 || scales.dtype() != biases.dtype())
    throw std::invalid_argument("a quantized linear takes float32 x, uint32 w, and scales and biases alike");
  if (x.ndim() < 1 || w.ndim() != 2 || scales.ndim() != 2)
    throw std::invalid_argument("a quantized linear takes x (…, n_in), w and scales of two dimensions");
  const QuantMatrix m{nullptr, nullptr, nullptr, float_type(scales), bits, group_size, w.shape(0), x.shape(-1)};
  check(m);
  const mx::Shape of_scales{m.n_out, m.n_groups()};
  if (w.shape(1) != m.n_in / 32 * bits || scales.shape() != of_scales || biases.shape() != of_scales)
    throw std::invalid_argument("x, w, scales and biases of a quantized linear do not fit each other");
  auto shape = x.shape();
  shape.back() = m.n_out;
  const auto stream = mx::default_stream(mx::Device::cpu);
  return mx::array(
      shape, mx::float32, std::make_shared<QuantizedLinear>(stream, std::move(processor), m),
      std::vector<mx::array>{mx::contiguous(x, false, stream), mx::contiguous(w, false, stream),
                             mx::contiguous(scales, false, stream), mx::contiguous(biases, false, stream)});
}

mx::array expert_mlp(std::shared_ptr<Processor> processor, std::shared_ptr<ExpertMlp> experts, const mx::array& x,
                     const mx::array& slots) {
  if (x.dtype() != mx::float32 || x.ndim() != 2 || slots.dtype() != mx::int32 || slots.ndim() != 2 ||
      x.shape(0) != slots.shape(0) || x.shape(1) != experts->n_in())
    throw std::invalid_argument("experts take x (n_rows, hidden) float32 and slots (n_rows, top_k) int32");
  const mx::Shape shape{x.shape(0), slots.shape(1), experts->hidden()};
  const auto stream = mx::default_stream(mx::Device::cpu);
  return mx::array(shape, mx::float32, std::make_shared<ExpertMlpOp>(stream, std::move(processor), std::move(experts)),
                   std::vector<mx::array>{mx::contiguous(x, false, stream), mx::contiguous(slots, false, stream)});
}

mx::array streamed_mlp(std::shared_ptr<ExpertStream> experts, std::uint32_t layer, std::size_t layout, int n_out,
                       const mx::array& x, const mx::array& indices, const std::vector<Forecast>& forecasts) {
  if (x.dtype() != mx::float32 || x.ndim() != 2 || indices.dtype() != mx::uint32 || indices.ndim() != 2 ||
      x.shape(0) != indices.shape(0))
    throw std::invalid_argument("experts take x (n_rows, hidden) float32 and indices (n_rows, top_k) uint32");
  const auto stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs{mx::contiguous(x, false, stream), mx::contiguous(indices, false, stream)};
  std::vector<Guess> guesses;
  for (const Forecast& f : forecasts) {
    if (f.logits.dtype() != mx::float32 || f.logits.ndim() < 1 || f.logits.size() == 0)
      throw std::invalid_argument("a forecast needs float32 logits (…, n_experts)");
    guesses.push_back({f.layer, f.n, f.logits.shape(-1), nullptr});
    inputs.push_back(mx::contiguous(f.logits, false, stream));
  }
  const mx::Shape shape{indices.shape(0), indices.shape(1), n_out};
  LayerCall call{layer, layout, shape[0], shape[1], n_out, nullptr, nullptr, std::move(guesses), nullptr};
  return mx::array(shape, mx::float32, std::make_shared<StreamedMlpOp>(stream, std::move(experts), std::move(call)),
                   std::move(inputs));
}

}  // namespace sparkle

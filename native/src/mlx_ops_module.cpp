// sparkle._mlx_ops: what only MLX's C++ API can do. CPU backend; loaded by the compute daemon alone.
//
// `adopt` makes an mx.array over memory that someone else owns, without a copy. MLX's Python API can do that on Metal
// (mx.asarray(x, copy=False)) but refuses on the CPU backend, whose allocator keeps the size in the 8 bytes before the
// data: a Buffer that starts 8 bytes earlier yields our pointer, and those 8 bytes lie in the region's header page.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mlx/mlx.h>

#include <stdexcept>

#include "cpu_ops.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace {

mx::Dtype dtype_of(const std::string& name) {
  if (name == "U8") return mx::uint8;
  if (name == "U16") return mx::uint16;
  if (name == "U32") return mx::uint32;
  if (name == "F16") return mx::float16;
  if (name == "BF16") return mx::bfloat16;
  if (name == "F32") return mx::float32;
  throw std::invalid_argument("no MLX dtype for '" + name + "'");
}

// The caller guarantees: at least 8 readable bytes lie before the data, and nothing is rewritten while an evaluation
// that reads it is under way. The memory stays alive as long as the array does.
mx::array adopt(nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> bytes,
                const std::vector<int>& shape, const std::string& dtype) {
  const mx::Dtype type = dtype_of(dtype);
  std::size_t n_bytes = type.size();
  for (int n : shape) n_bytes *= static_cast<std::size_t>(n);
  if (n_bytes != bytes.nbytes()) throw std::invalid_argument("bytes, shape and dtype disagree");
  auto* data = bytes.data();
  if (reinterpret_cast<std::uintptr_t>(data) % type.size() != 0)
    throw std::invalid_argument("memory is not aligned for its dtype");
  mx::allocator::Buffer buffer(data - sizeof(std::size_t));
  if (buffer.raw_ptr() != data)
    throw std::runtime_error("this MLX lays out CPU buffers differently; it is not the pinned version");
  // The deleter may run on any thread, without the GIL: dropping the reference to the ndarray takes it.
  auto owner = std::make_shared<decltype(bytes)>(std::move(bytes));
  auto release = [owner](mx::allocator::Buffer) mutable {
    nb::gil_scoped_acquire gil;
    owner.reset();
  };
  return mx::array(mx::allocator::Data(buffer, release), mx::Shape(shape.begin(), shape.end()), type);
}

// (address, bytes from slot to slot) of a projection's three pieces, and what they hold.
sparkle::Projection projection(const std::vector<std::pair<std::uintptr_t, std::size_t>>& pieces, int n_out, int n_in,
                               int group_size, int bits, const std::string& dtype) {
  if (pieces.size() != 3 || pieces[1].second != pieces[2].second)
    throw std::invalid_argument("a projection has weights, scales and biases, the last two alike");
  const auto type = dtype == "F32"    ? sparkle::Float::kF32
                    : dtype == "BF16" ? sparkle::Float::kBF16
                                      : sparkle::Float::kF16;
  if (type == sparkle::Float::kF16 && dtype != "F16") throw std::invalid_argument("scales of dtype '" + dtype + "'");
  const auto at = [&](int i) { return reinterpret_cast<const std::uint8_t*>(pieces[i].first); };
  return {at(0),
          at(1),
          at(2),
          pieces[0].second,
          pieces[1].second,
          {nullptr, nullptr, nullptr, type, bits, group_size, n_out, n_in}};
}

// A Provider written in Python. Called by MLX's worker thread, which does not have the GIL.
class PythonProvider : public sparkle::Provider {
 public:
  explicit PythonProvider(nb::object methods) : methods_(std::move(methods)) {}
  ~PythonProvider() override {
    nb::gil_scoped_acquire gil;
    methods_.reset();
  }
  Slots look_up(std::uint32_t layer, const Experts& experts) override {
    nb::gil_scoped_acquire gil;
    return nb::cast<Slots>(methods_.attr("look_up")(layer, experts));
  }
  void fetch(std::uint32_t layer, const Experts& experts) override {
    nb::gil_scoped_acquire gil;
    methods_.attr("fetch")(layer, experts);
  }
  Slots wait() override {
    nb::gil_scoped_acquire gil;
    return nb::cast<Slots>(methods_.attr("wait")());
  }
  void hint(std::uint32_t layer, const Experts& experts) override {
    nb::gil_scoped_acquire gil;
    methods_.attr("hint")(layer, experts);
  }

 private:
  nb::object methods_;
};

std::shared_ptr<sparkle::Client> client_of(const nb::capsule& capsule) {
  return *static_cast<std::shared_ptr<sparkle::Client>*>(capsule.data(sparkle::Client::kCapsule));
}

}  // namespace

NB_MODULE(_mlx_ops, m) {
  nb::set_leak_warnings(false);  // adopted arrays may outlive this module at exit: the process ends with them
  m.def("adopt", &adopt, "bytes"_a, "shape"_a, "dtype"_a);

  m.def("kernel_names", &sparkle::kernel_names);
  nb::class_<sparkle::Processor>(m, "Processor")
      .def(nb::init<const std::string&, int, int>(), "kernels"_a, "n_threads"_a, "spin_us"_a)
      .def_prop_ro("kernels", [](const sparkle::Processor& p) { return std::string(p.use.name); })
      .def_prop_ro("n_threads", [](const sparkle::Processor& p) { return p.workers.n_threads(); });
  nb::class_<sparkle::Projection>(m, "Projection")
      .def(
          "__init__",
          [](sparkle::Projection* self, const std::vector<std::pair<std::uintptr_t, std::size_t>>& pieces, int n_out,
             int n_in, int group_size, int bits, const std::string& dtype) {
            new (self) sparkle::Projection(projection(pieces, n_out, n_in, group_size, bits, dtype));
          },
          "pieces"_a, "n_out"_a, "n_in"_a, "group_size"_a, "bits"_a, "dtype"_a);
  nb::class_<sparkle::ExpertRegion>(m, "ExpertRegion")
      .def(nb::init<std::uint32_t, std::uint32_t, sparkle::Projection, sparkle::Projection, sparkle::Projection>(),
           "first_slot"_a, "n_slots"_a, "gate"_a, "up"_a, "down"_a);
  nb::class_<sparkle::ExpertMlp>(m, "ExpertMlp").def(nb::init<std::vector<sparkle::ExpertRegion>>(), "regions"_a);
  m.def("quantized_linear", &sparkle::quantized_linear, "processor"_a, "x"_a, "w"_a, "scales"_a, "biases"_a,
        "group_size"_a, "bits"_a);
  m.def("expert_mlp", &sparkle::expert_mlp, "processor"_a, "experts"_a, "x"_a, "slots"_a);

  nb::class_<sparkle::ExpertStream>(m, "ExpertStream")
      .def(nb::init<std::shared_ptr<sparkle::Processor>>(), "processor"_a)
      .def(
          "attach",
          [](sparkle::ExpertStream& s, const nb::capsule& client,
             std::vector<std::shared_ptr<sparkle::ExpertMlp>> experts) {
            s.attach(client_of(client), std::move(experts));
          },
          "client"_a, "experts"_a)
      .def(
          "begin",
          [](sparkle::ExpertStream& s, std::uint32_t step, std::uint16_t stream, std::uint16_t rows,
             std::uint32_t token, nb::object provider) {
            s.begin({step, stream, rows, token}, std::make_unique<PythonProvider>(std::move(provider)));
          },
          "step"_a, "stream"_a, "rows"_a, "token"_a, "provider"_a)
      .def("check", &sparkle::ExpertStream::check)
      .def("end", &sparkle::ExpertStream::end);
  m.def(
      "streamed_mlp",
      [](std::shared_ptr<sparkle::ExpertStream> stream, std::uint32_t layer, std::size_t layout, int n_out,
         const mx::array& x, const mx::array& indices,
         const std::vector<std::tuple<std::uint32_t, int, mx::array>>& forecasts) {
        std::vector<sparkle::Forecast> of;
        for (const auto& [ahead, n, logits] : forecasts) of.push_back({ahead, n, logits});
        return sparkle::streamed_mlp(std::move(stream), layer, layout, n_out, x, indices, of);
      },
      "stream"_a, "layer"_a, "layout"_a, "n_out"_a, "x"_a, "indices"_a, "forecasts"_a);
}

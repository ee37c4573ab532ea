// sparkle._mlx_ops: what only MLX's C++ API can do. CPU backend; loaded by the compute daemon alone.
//
// `adopt` makes an mx.array over memory that someone else owns, without a copy. MLX's Python API can do that on Metal
// (mx.asarray(x, copy=False)) but refuses on the CPU backend, whose allocator keeps the size in the 8 bytes before the
// data: a Buffer that starts 8 bytes earlier yields our pointer, and those 8 bytes lie in the region's header page.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mlx/mlx.h>

#include <stdexcept>

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

}  // namespace

NB_MODULE(_mlx_ops, m) {
  nb::set_leak_warnings(false);  // adopted arrays may outlive this module at exit: the process ends with them
  m.def("adopt", &adopt, "bytes"_a, "shape"_a, "dtype"_a);
}

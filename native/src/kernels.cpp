#include "kernels.h"

#include <stdexcept>

namespace sparkle {

extern const Kernels kScalar, kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&kAvx512);
  if (has_fma) found.push_back(&kAvx2);
#elif defined(__aarch64__)
  found.push_back(&kNeon);
#endif
  found.push_back(&kPortable);
  found.push_back(&kScalar);
  return found;
}

}  // namespace

void check(const QuantMatrix& m) {
  const bool is_packed = m.bits == 8 || (m.bits >= 2 && m.bits <= 6);
  if (!is_packed || (m.group != 32 && m.group != 64 && m.group != 128) || m.n_in <= 0 || m.n_in % m.group != 0 ||
      m.n_out < 0)
    throw std::invalid_argument("no kernel for " + std::to_string(m.n_out) + " x " + std::to_string(m.n_in) +
                                " weights of " + std::to_string(m.bits) + " bits in groups of " +
                                std::to_string(m.group));
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernels* k : runnable()) names.emplace_back(k->name);
  return names;
}

const Kernels& kernels(const std::string& name) {
  std::string names;
  for (const Kernels* k : runnable()) {
    if (name == k->name) return *k;
    names += std::string(names.empty() ? "" : ", ") + k->name;
  }
  throw std::invalid_argument("no kernels '" + name + "' for this processor; it can run " + names);
}

}  // namespace sparkle

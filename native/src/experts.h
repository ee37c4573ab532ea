// The experts' arithmetic over pool slots: gate, up, SwiGLU and down for (row, expert) pairs, straight from the slots.
//
// Reads the slots' memory, which the caller holds; owns scratch memory only. Pairs are grouped by slot, so that a
// record is read once for all rows that want it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "workers.h"

namespace sparkle {

// The kernels that a process computes with, and its threads. For one caller at a time.
struct Processor {
  Processor(const std::string& name, int n_threads, int spin_us)
      : use(kernels(name)), workers(n_threads, std::chrono::microseconds(spin_us)), scratch(workers.n_threads()) {}

  // Memory of a thread's own, of at least n floats.
  float* scratch_of(int thread, std::size_t n) {
    auto& mine = scratch[static_cast<std::size_t>(thread)];
    if (mine.size() < n) mine.resize(n);
    return mine.data();
  }

  const Kernels& use;
  Workers workers;
  std::vector<std::vector<float>> scratch;
};

// y[r][o] of a whole matrix for n rows that lie one after another.
void linear(Processor& processor, const QuantMatrix& m, const float* x, int n_rows, float* y);

// Where one projection's pieces lie in a region: slot s of the region at base + s * stride.
struct Projection {
  const std::uint8_t* w;
  const std::uint8_t* scales;
  const std::uint8_t* biases;
  std::size_t w_stride, scale_stride;  // bytes from slot to slot
  QuantMatrix shape;                   // of one expert; its pointers are not used

  QuantMatrix of(std::size_t slot) const {
    QuantMatrix m = shape;
    m.w = w + slot * w_stride;
    m.scales = scales + slot * scale_stride;
    m.biases = biases + slot * scale_stride;
    return m;
  }
};

struct ExpertRegion {
  std::uint32_t first_slot, n_slots;
  Projection gate, up, down;
};

struct Pair {
  int row;            // of x
  int place;          // of the output: out + place * hidden
  std::int32_t slot;  // -1: not now
};

// out[place] = down(silu(gate(x[row])) * up(x[row])) for every pair with a slot. Throws std::out_of_range for a slot
// that is in no region.
class ExpertMlp {
 public:
  explicit ExpertMlp(std::vector<ExpertRegion> regions);

  void run(Processor& processor, const float* x, const std::vector<Pair>& pairs, float* out);

  int n_in() const { return regions_.front().gate.shape.n_in; }
  int hidden() const { return regions_.front().down.shape.n_out; }

 private:
  struct Job {
    const ExpertRegion* region;
    std::size_t slot;   // in the region
    int first, n_rows;  // of the ordered pairs
  };

  const ExpertRegion& region_of(std::int32_t slot) const;

  std::vector<ExpertRegion> regions_;
  std::vector<float> sums_, inner_, inner_sums_;
};

}  // namespace sparkle

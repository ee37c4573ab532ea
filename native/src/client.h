// What a pool client maps and holds: the control segment as one process sees it.
//
// Owns the mapping and the counts of held slots. Shared by the two extension modules: sparkle._native makes it for
// Python, and sparkle._mlx_ops looks experts up in it while a step is computed. Used by one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "mapping.h"
#include "ring.h"
#include "slots.h"

namespace sparkle {

// A control segment together with the mapping that it lives in.
struct Segment {
  std::shared_ptr<Mapping> mapping;
  Control control;
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  // Both modules know a client that Python hands from one to the other by this name of its capsule.
  static constexpr const char* kCapsule = "sparkle.PoolClient";

  Client(Segment segment, std::uint32_t bit)
      : segment_(std::move(segment)), bit_(bit), holder_(segment_.control, bit) {}

  const Control& control() const { return segment_.control; }
  Ring& ring() const { return segment_.control.ring(bit_); }
  Holder& holder() { return holder_; }

  // Slot of each expert, held; -1 where it is not in the pool. Throws std::out_of_range, holding nothing.
  std::vector<std::int32_t> hold(std::uint32_t layer, const std::vector<std::uint32_t>& experts) {
    for (auto e : experts) segment_.control.table(layer, e);
    std::vector<std::int32_t> slots;
    slots.reserve(experts.size());
    for (auto e : experts) slots.push_back(holder_.hold(layer, e));
    return slots;
  }

  // Undo holds; -1 is passed over.
  void release(const std::vector<std::int32_t>& slots) {
    for (auto s : slots)
      if (s >= 0) holder_.release(static_cast<std::uint32_t>(s));
  }

  // Those of `experts` that no slot holds now; nothing is held.
  std::vector<std::uint32_t> absent(std::uint32_t layer, const std::vector<std::uint32_t>& experts) const {
    std::vector<std::uint32_t> out;
    for (auto e : experts)
      if (segment_.control.table(layer, e).load() < 0) out.push_back(e);
    return out;
  }

 private:
  Segment segment_;
  std::uint32_t bit_;
  Holder holder_;
};

}  // namespace sparkle

#include "expert_stream.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace sparkle {
namespace {

// Slots that are let go of on every way out.
class Held {
 public:
  Held(std::shared_ptr<Client> client, std::vector<std::int32_t> slots)
      : client_(std::move(client)), slots_(std::move(slots)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { release(); }

  const std::vector<std::int32_t>& slots() const { return slots_; }

  void release() {
    client_->release(slots_);
    slots_.clear();
  }

 private:
  std::shared_ptr<Client> client_;
  std::vector<std::int32_t> slots_;
};

// The experts of the step, each once, in rising order.
std::vector<std::uint32_t> distinct(const LayerCall& call) {
  std::vector<std::uint32_t> experts(call.indices, call.indices + std::size_t(call.n_rows) * call.top_k);
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  return experts;
}

// The pairs whose expert has a slot. `slots` belongs to `experts`, which rises.
std::vector<Pair> pairs_of(const LayerCall& call, const std::vector<std::uint32_t>& experts,
                           const std::vector<std::int32_t>& slots) {
  std::vector<Pair> pairs;
  for (int i = 0; i < call.n_rows * call.top_k; ++i) {
    const auto found = std::lower_bound(experts.begin(), experts.end(), call.indices[i]);
    if (found == experts.end() || *found != call.indices[i]) continue;
    const std::int32_t slot = slots[static_cast<std::size_t>(found - experts.begin())];
    if (slot >= 0) pairs.push_back({i / call.top_k, i, slot});
  }
  return pairs;
}

}  // namespace

void ExpertStream::run(const LayerCall& call) noexcept {
  try {
    if (!error_) compute(call);
  } catch (...) {
    error_ = std::current_exception();
  }
  if (error_)
    std::fill_n(call.out, std::size_t(call.n_rows) * call.top_k * call.hidden, std::numeric_limits<float>::quiet_NaN());
}

void ExpertStream::compute(const LayerCall& call) {
  if (!client_ || !provider_) throw std::logic_error("experts are computed outside of a step");
  const auto experts = distinct(call);
  auto found = look_up(call.layer, experts);
  Held held(client_, std::move(found));  // of the pool as it is now: the look-up may have attached another
  std::vector<std::uint32_t> missing;
  for (std::size_t i = 0; i < experts.size(); ++i)
    if (held.slots()[i] < 0) missing.push_back(experts[i]);
  if (!missing.empty()) provider_->fetch(call.layer, missing);
  hint(call.guesses);
  // Hits first: the disk reads meanwhile.
  experts_of(call).run(*processor_, call.x, pairs_of(call, experts, held.slots()), call.out);
  held.release();
  if (missing.empty()) return;
  auto came = provider_->wait();
  Held late(client_, std::move(came));
  if (late.slots().size() != missing.size()) throw std::logic_error("other slots than were asked for");
  experts_of(call).run(*processor_, call.x, pairs_of(call, missing, late.slots()), call.out);
}

std::vector<std::int32_t> ExpertStream::look_up(std::uint32_t layer, const std::vector<std::uint32_t>& experts) {
  auto slots = client_->hold(layer, experts);
  if (ring_push(client_->ring(), origin_, layer, experts, slots)) return slots;
  client_->release(slots);
  return provider_->look_up(layer, experts);
}

void ExpertStream::hint(const std::vector<Guess>& guesses) {
  for (const Guess& guess : guesses) {
    std::vector<std::uint32_t> ranked(static_cast<std::size_t>(guess.n_experts));
    std::iota(ranked.begin(), ranked.end(), 0U);
    const auto end = ranked.begin() + std::min(guess.n, guess.n_experts);
    std::partial_sort(ranked.begin(), end, ranked.end(), [&](std::uint32_t a, std::uint32_t b) {
      return guess.logits[a] != guess.logits[b] ? guess.logits[a] > guess.logits[b] : a < b;
    });
    ranked.erase(end, ranked.end());
    if (const auto absent = client_->absent(guess.layer, ranked); !absent.empty()) provider_->hint(guess.layer, absent);
  }
}

ExpertMlp& ExpertStream::experts_of(const LayerCall& call) const {
  if (call.layout >= experts_.size() || !experts_[call.layout])
    throw std::logic_error("no experts of layout class " + std::to_string(call.layout));
  ExpertMlp& experts = *experts_[call.layout];
  if (experts.hidden() != call.hidden) throw std::logic_error("the pool's experts have another size than the layer's");
  return experts;
}

}  // namespace sparkle

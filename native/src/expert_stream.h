// A layer's experts, found, waited for and computed while the step's graph runs: no expert is looked up beforehand.
//
// Reads routing, the pool's control segment and held slots; marks and releases slots; writes use events. Asks its
// Provider only for what is not in the pool. Runs on the stream's thread, one layer at a time, while the thread that
// owns the PoolClient waits for the step: so the client is used by one thread at a time. Never throws into MLX: after
// the first fault every later layer of the step gives NaN at once, and `check` tells the fault when the step is over.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "client.h"
#include "experts.h"

namespace sparkle {

// Gets experts that are not in the pool. Any of these may throw.
class Provider {
 public:
  using Experts = std::vector<std::uint32_t>;
  using Slots = std::vector<std::int32_t>;

  virtual ~Provider() = default;
  // Client::hold and an event of it; waits until the ring has room.
  virtual Slots look_up(std::uint32_t layer, const Experts& experts) = 0;
  // Ask for experts, and go on.
  virtual void fetch(std::uint32_t layer, const Experts& experts) = 0;
  // The held slots of what was asked for; nothing may be held. The pool may be another one afterwards: `attach`.
  virtual Slots wait() = 0;
  // Say what a later layer will probably want; nothing is waited for.
  virtual void hint(std::uint32_t layer, const Experts& experts) = 0;
};

// A later layer's router, asked about this layer's input: its `n` likeliest of `n_experts` are a guess.
struct Guess {
  std::uint32_t layer;
  int n, n_experts;
  const float* logits;
};

// What one layer of the step is to compute.
struct LayerCall {
  std::uint32_t layer;
  std::size_t layout;  // class of its records
  int n_rows, top_k, hidden;
  const float* x;                // (n_rows, n_in)
  const std::uint32_t* indices;  // (n_rows, top_k)
  std::vector<Guess> guesses;
  float* out;  // (n_rows, top_k, hidden)
};

class ExpertStream {
 public:
  explicit ExpertStream(std::shared_ptr<Processor> processor) : processor_(std::move(processor)) {}

  // The pool's mapping, and the experts of each layout class in it (null: none that we compute).
  void attach(std::shared_ptr<Client> client, std::vector<std::shared_ptr<ExpertMlp>> experts) {
    client_ = std::move(client);
    experts_ = std::move(experts);
  }

  void begin(Origin origin, std::unique_ptr<Provider> provider) {
    origin_ = origin;
    provider_ = std::move(provider);
    error_ = nullptr;
  }

  void end() { provider_.reset(); }

  // Rethrow what went wrong in the step so far; it is told once.
  void check() {
    if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  void run(const LayerCall& call) noexcept;

 private:
  void compute(const LayerCall& call);
  std::vector<std::int32_t> look_up(std::uint32_t layer, const std::vector<std::uint32_t>& experts);
  void hint(const std::vector<Guess>& guesses);
  ExpertMlp& experts_of(const LayerCall& call) const;

  std::shared_ptr<Processor> processor_;
  std::shared_ptr<Client> client_;
  std::vector<std::shared_ptr<ExpertMlp>> experts_;
  Origin origin_{};
  std::unique_ptr<Provider> provider_;
  std::exception_ptr error_;
};

}  // namespace sparkle

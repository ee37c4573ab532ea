// The arithmetic of the eviction policy `learned`: a value for each expert of each layer, learned online, and the order
// of eviction that follows from it. What a value means, and the source: shared/sparkle/policy_learned.py.
//
// A layer is named by its place in the order of turns. A turn costs a row of the layer's matrix for each expert that
// its last three tokens used, and a sort; put and take are O(1); the first victim is O(layers), each further one O(log
// layers). Deterministic, for one thread. Owns its memory; a matrix is the kernel's zero pages until it is written.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sparkle {

namespace learned {

inline constexpr double kDiscount = 0.6;  // per turn
inline constexpr float kDecay = 0.9f;  // of usage, per turn
inline constexpr float kUsageFloor = 0.025f;  // of an even share: keeps log-odds finite
inline constexpr float kPairRate = 0.16f;  // of learning, shared among a token's experts
inline constexpr float kSecondLast = 0.5f;  // how much the token before the last counts, next to the last
inline constexpr double kSharedRate = 0.06;  // of learning the weights that all experts have in common, by Adagrad
inline constexpr double kFirstSquare = 0.01;  // that Adagrad starts from
inline constexpr std::uint32_t kMaxStepRows = 8;  // a token and its drafts; more are a prompt, whose union says little
inline constexpr std::size_t kOccasions = 2;  // on which a token's followers are remembered
inline constexpr std::size_t kMaxTokens = 4096;
inline constexpr std::size_t kMaxStreams = 16;
inline constexpr std::uint64_t kActiveTurns = 4;  // who had none of a layer's last turns does not count now
inline constexpr std::uint32_t kMaxExperts = 1 << 15;  // MAX_EXPERTS of sparkle.trace

enum Weight : std::size_t { kBias, kUsage, kFirstOccasion, kNWeights = kFirstOccasion + kOccasions };
using Weights = std::array<double, kNWeights>;

struct Shape {
  std::uint32_t n_experts, top_k;
};

// One step's use of one layer; the fields are those of sparkle.trace.Event, and no more to be trusted.
struct Use {
  std::uint32_t stream, rows, token;
  std::span<const std::uint32_t> experts;
};

// What a layer's turn said of its experts, and on what grounds.
struct Forecast {
  std::uint32_t stream = 0, token = 0;
  std::uint64_t turn = 0;  // of the layer, counted
  std::vector<std::uint32_t> used, before;  // by the step, none after a prompt; by the step before it; both sorted
  std::array<std::vector<std::uint16_t>, kOccasions> followers;  // of the token, the latest occasion first
  std::vector<float> usage;  // log-odds
  std::vector<float> value;
};

// Weights that all experts of all layers have in common.
class SharedWeights {
 public:
  SharedWeights() {
    values_.fill(0.5);
    values_[kBias] = 0.0;
    values_[kUsage] = 1.0;
    squares_.fill(kFirstSquare);
  }

  const Weights& values() const { return values_; }

  void learn(std::span<const float> error, const Forecast& said) {
    Weights slopes{};
    for (std::size_t e = 0; e < error.size(); ++e) {
      slopes[kBias] += error[e];
      slopes[kUsage] += double{error[e]} * said.usage[e];
    }
    for (std::size_t i = 0; i < kOccasions; ++i)
      for (auto e : said.followers[i]) slopes[kFirstOccasion + i] += error[e];
    for (std::size_t i = 0; i < kNWeights; ++i) {
      squares_[i] += slopes[i] * slopes[i];
      values_[i] += kSharedRate * slopes[i] / std::sqrt(squares_[i]);
    }
  }

 private:
  Weights values_, squares_;
};

// Experts that the token after a token used, on its last occasions; of kMaxTokens tokens, those added to last.
class TokenMemory {
 public:
  TokenMemory(std::size_t n_layers, std::uint32_t max_top_k) : n_layers_(n_layers), occasion_size_(1 + max_top_k) {}

  // Occasion 0 is the latest; empty where there was none.
  std::span<const std::uint16_t> after(std::uint32_t token, std::size_t place, std::size_t occasion) const {
    const auto found = of_.find(token);
    if (found == of_.end()) return {};
    const std::uint16_t* at = found->second->occasions.data() + (place * kOccasions + occasion) * occasion_size_;
    return {at + 1, at[0]};
  }

  void add(std::uint32_t token, std::size_t place, std::span<const std::uint32_t> followers) {
    const auto newest = touch(token).occasions.begin() + std::ptrdiff_t(place * kOccasions * occasion_size_);
    const auto end = newest + std::ptrdiff_t(kOccasions * occasion_size_);
    std::move_backward(newest, end - std::ptrdiff_t(occasion_size_), end);
    const std::size_t n = std::min(followers.size(), occasion_size_ - 1);  // one token has no more
    newest[0] = std::uint16_t(n);
    for (std::size_t i = 0; i < n; ++i) newest[std::ptrdiff_t(1 + i)] = std::uint16_t(followers[i]);
  }

 private:
  struct Token {
    std::uint32_t id;
    std::vector<std::uint16_t> occasions;  // [layer][occasion][how many, and they]
  };

  Token& touch(std::uint32_t token) {
    if (const auto found = of_.find(token); found != of_.end()) {
      tokens_.splice(tokens_.end(), tokens_, found->second);
      return tokens_.back();
    }
    if (tokens_.size() == kMaxTokens) {
      of_.erase(tokens_.front().id);
      tokens_.pop_front();
    }
    tokens_.push_back({token, std::vector<std::uint16_t>(n_layers_ * kOccasions * occasion_size_)});
    of_[token] = std::prev(tokens_.end());
    return tokens_.back();
  }

  std::size_t n_layers_, occasion_size_;
  std::list<Token> tokens_;  // the one added to last at the end
  std::unordered_map<std::uint32_t, std::list<Token>::iterator> of_;
};

// A layer's experts from the one of least value, and which of them are in the pool: one bit for each rank.
class Ranking {
 public:
  explicit Ranking(std::size_t n) : order_(n), rank_(n), is_here_((n + 63) / 64) {}

  // Values are not negative, so that their bits are in order as they are; of equals the smaller id comes first.
  void sort(std::span<const float> value) {
    for (std::size_t e = 0; e < value.size(); ++e)
      order_[e] = std::uint64_t{std::bit_cast<std::uint32_t>(value[e])} << 32 | e;
    std::sort(order_.begin(), order_.end());
    std::vector<std::uint64_t> is_here(is_here_.size());
    for (std::size_t r = 0; r < order_.size(); ++r) {
      std::uint32_t& rank = rank_[expert(r)];
      if (is_here_[rank / 64] & bit(rank)) is_here[r / 64] |= bit(r);
      rank = std::uint32_t(r);
    }
    is_here_ = std::move(is_here);
  }

  void put(std::uint32_t expert) { is_here_[rank_[expert] / 64] |= bit(rank_[expert]); }
  void take(std::uint32_t expert) { is_here_[rank_[expert] / 64] &= ~bit(rank_[expert]); }
  std::uint32_t expert(std::size_t rank) const { return std::uint32_t(order_[rank]); }

  // The first rank, not before `rank`, whose expert is in the pool.
  std::optional<std::size_t> next(std::size_t rank) const {
    for (std::size_t i = rank / 64; i < is_here_.size(); ++i) {
      const std::uint64_t bits = i == rank / 64 ? is_here_[i] & ~(bit(rank) - 1) : is_here_[i];
      if (bits) return 64 * i + std::size_t(std::countr_zero(bits));
    }
    return std::nullopt;
  }

 private:
  static std::uint64_t bit(std::size_t rank) { return std::uint64_t{1} << rank % 64; }

  std::vector<std::uint64_t> order_;  // value's bits << 32 | expert
  std::vector<std::uint32_t> rank_;  // of each expert in order_
  std::vector<std::uint64_t> is_here_;
};

// What is known of one layer's experts, their values and their order.
class Layer {
 public:
  Layer(Shape shape, std::size_t place)
      : place_(place),
        n_(shape.n_experts),
        top_k_(float(shape.top_k)),
        floor_(kUsageFloor * even_share(shape)),
        usage_(n_, even_share(shape)),
        value_(usage_),
        error_(n_),
        pairs_(static_cast<float*>(std::calloc(n_ * n_, sizeof(float)))),
        next_(blank()),
        ranking_(n_) {
    if (!pairs_) throw std::bad_alloc();
    ranking_.sort(value_);
  }

  void seed(std::span<const double> shares) {
    if (shares.size() != n_) throw std::invalid_argument("as many shares as the layer has experts");
    for (std::size_t e = 0; e < n_; ++e) {
      usage_[e] = float(shares[e]);
      value_[e] = usage_[e] + floor_;
    }
    ranking_.sort(value_);
  }

  void turn(const Use& use, SharedWeights& weights, TokenMemory& memory) {
    for (auto e : use.experts) check(e);
    used_.assign(use.experts.begin(), use.experts.end());
    std::sort(used_.begin(), used_.end());
    used_.erase(std::unique(used_.begin(), used_.end()), used_.end());  // a client may name one twice
    const float strength = strength_of(used_);  // many rows count as one token
    for (float& usage : usage_) usage *= kDecay;
    for (auto e : used_) usage_[e] += (1 - kDecay) * strength;

    const auto last = std::find_if(last_.begin(), last_.end(), [&](const auto& f) { return f.stream == use.stream; });
    const bool is_step = use.rows <= kMaxStepRows;
    forecast(use, is_step && last != last_.end() ? &*last : nullptr, weights.values(), memory);
    if (is_step && last != last_.end() && !last->used.empty()) {
      learn(*last, weights);
      if (use.rows == 1) memory.add(last->token, place_, used_);
    }
    keep(last);
    value_all();
    ranking_.sort(value_);
  }

  void check(std::uint32_t expert) const {
    if (expert >= n_) throw std::out_of_range("expert");
  }

  std::span<const float> values() const { return value_; }
  const Ranking& ranking() const { return ranking_; }
  Ranking& ranking() { return ranking_; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };

  static float even_share(Shape shape) { return std::min(0.5f, float(shape.top_k) / float(shape.n_experts)); }

  Forecast blank() const {
    Forecast f;
    f.usage.resize(n_);
    f.value.resize(n_);
    return f;
  }

  float strength_of(std::span<const std::uint32_t> used) const {
    return std::min(1.0f, top_k_ / float(std::max<std::size_t>(1, used.size())));
  }

  void add_pairs(std::span<const std::uint32_t> sources, float strength, std::vector<float>& odds) const {
    for (auto source : sources) {
      const float* pair = &pairs_[source * n_];
      for (std::size_t e = 0; e < n_; ++e) odds[e] += strength * pair[e];
    }
  }

  // Into next_. `last`: what the stream's step before said, if this one continues it.
  void forecast(const Use& use, const Forecast* last, const Weights& weights, const TokenMemory& memory) {
    next_.stream = use.stream;
    next_.token = use.token;
    next_.turn = ++n_turns_;
    next_.used.clear();
    next_.before.clear();
    for (auto& followers : next_.followers) followers.clear();
    if (use.rows <= kMaxStepRows) next_.used = used_;
    if (last) next_.before = last->used;

    std::vector<float>& odds = next_.value;
    const float bias = float(weights[kBias]), usage_weight = float(weights[kUsage]);
    for (std::size_t e = 0; e < n_; ++e) {
      next_.usage[e] = std::log((usage_[e] + floor_) / (1 + floor_ - usage_[e]));
      odds[e] = usage_weight * next_.usage[e] + bias;
    }
    add_pairs(next_.used, strength_of(next_.used), odds);
    add_pairs(next_.before, kSecondLast * strength_of(next_.before), odds);
    for (std::size_t i = 0; i < kOccasions && use.rows <= kMaxStepRows; ++i) {
      const auto followers = memory.after(use.token, place_, i);
      next_.followers[i].assign(followers.begin(), followers.end());
      for (auto e : followers) odds[e] += float(weights[kFirstOccasion + i]);
    }
    for (float& x : odds) x = 1 / (1 + std::exp(-x));
  }

  // At the turn that `said` spoke of, used_ were used and next_ is said.
  void learn(const Forecast& said, SharedWeights& weights) {
    for (std::size_t e = 0; e < n_; ++e) error_[e] = float(kDiscount) * next_.value[e] - said.value[e];
    for (auto e : used_) error_[e] = 1 - said.value[e];
    auto add = [&](std::uint32_t source, float strength) {
      float* pair = &pairs_[source * n_];
      const float rate = strength * kPairRate / top_k_;
      for (std::size_t e = 0; e < n_; ++e) pair[e] += rate * error_[e];
    };
    const float strength = strength_of(said.used), before = kSecondLast * strength_of(said.before);
    for (auto source : said.used)  // a source of both kinds learns as one of the weaker kind
      if (!std::binary_search(said.before.begin(), said.before.end(), source)) add(source, strength);
    for (auto source : said.before) add(source, before);
    weights.learn(error_, said);
  }

  // next_ becomes the stream's last forecast, the newest of all; `last` is the one in its place, or the end.
  void keep(std::vector<Forecast>::iterator last) {
    if (last == last_.end()) {
      if (last_.size() < kMaxStreams) {
        last_.push_back(std::exchange(next_, blank()));
        return;
      }
      last = last_.begin();
    }
    std::rotate(last, last + 1, last_.end());
    std::swap(last_.back(), next_);
  }

  // Whichever of the streams that are active comes next, an expert may be of use to it.
  void value_all() {
    std::fill(value_.begin(), value_.end(), 1.0f);
    const auto active = std::find_if(last_.begin(), last_.end(), [&](const auto& f) { return is_active(f); });
    if (last_.end() - active == 1) {
      value_ = active->value;
      return;
    }
    for (auto f = active; f != last_.end(); ++f)
      for (std::size_t e = 0; e < n_; ++e) value_[e] *= 1 - f->value[e];
    for (float& value : value_) value = 1 - value;
  }

  bool is_active(const Forecast& f) const { return f.turn + kActiveTurns > n_turns_; }

  std::size_t place_, n_;
  float top_k_, floor_;
  std::vector<float> usage_, value_, error_;
  std::vector<std::uint32_t> used_;  // at this turn, sorted
  std::unique_ptr<float[], Free> pairs_;  // [used][used next]
  std::uint64_t n_turns_ = 0;
  std::vector<Forecast> last_;  // of each stream, the oldest first
  Forecast next_;
  Ranking ranking_;
};

}  // namespace learned

// The layers, and what they share. Throws std::out_of_range, having changed nothing, for a place or an expert that is
// none.
class LearnedPolicy {
 public:
  using Shape = learned::Shape;
  class Victims;

  // Throws std::invalid_argument for a layer that can't be.
  explicit LearnedPolicy(std::span<const Shape> shapes) : memory_(shapes.size(), max_top_k(shapes)) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      layers_.emplace_back(shapes[i], i);
      discounts_.push_back(std::pow(learned::kDiscount, double(i + 1) / double(shapes.size())));
    }
  }

  LearnedPolicy(LearnedPolicy&&) = default;

  void seed(std::size_t place, std::span<const double> shares) { layers_.at(place).seed(shares); }
  void turn(std::size_t place, const learned::Use& use) {
    layers_.at(place).turn(use, weights_, memory_);
    at_ = place;
  }
  void put(std::size_t place, std::uint32_t expert) { checked(place, expert).ranking().put(expert); }
  void take(std::size_t place, std::uint32_t expert) { checked(place, expert).ranking().take(expert); }

  std::span<const float> values(std::size_t place) const { return layers_.at(place).values(); }
  const learned::Weights& weights() const { return weights_.values(); }

  // A value counts less, the longer until its layer's turn: a turn of all layers is one discount.
  double discount(std::size_t place) const { return discounts_[(place + layers_.size() - at_ - 1) % layers_.size()]; }

 private:
  static std::uint32_t max_top_k(std::span<const Shape> shapes) {
    std::uint32_t most = 1;
    for (auto [n_experts, top_k] : shapes) {
      if (top_k < 1 || top_k > n_experts || n_experts > learned::kMaxExperts)
        throw std::invalid_argument("a layer that can't be");
      most = std::max(most, top_k);
    }
    return most;
  }

  learned::Layer& checked(std::size_t place, std::uint32_t expert) {
    learned::Layer& layer = layers_.at(place);
    layer.check(expert);
    return layer;
  }

  std::vector<learned::Layer> layers_;
  std::vector<double> discounts_;  // of the layers after the one whose turn it was
  learned::SharedWeights weights_;
  learned::TokenMemory memory_;
  std::size_t at_ = 0;  // whose turn was last
};

// The experts in the pool, from the one to evict first: the layers' orders, merged as far as they are asked for.
// Refers to the policy, and means nothing after another call of it.
class LearnedPolicy::Victims {
 public:
  struct Key {
    std::size_t place;
    std::uint32_t expert;
  };

  explicit Victims(const LearnedPolicy& policy) : policy_(policy) {
    for (std::size_t i = 0; i < policy.layers_.size(); ++i) add(i, 0);
    std::make_heap(heads_.begin(), heads_.end(), is_later);
  }

  std::optional<Key> next() {
    if (heads_.empty()) return std::nullopt;
    std::pop_heap(heads_.begin(), heads_.end(), is_later);
    const Head head = heads_.back();
    heads_.pop_back();
    if (add(head.place, head.rank + 1)) std::push_heap(heads_.begin(), heads_.end(), is_later);
    return Key{head.place, policy_.layers_[head.place].ranking().expert(head.rank)};
  }

 private:
  struct Head {
    double score;
    std::size_t place, rank;
  };

  static bool is_later(const Head& a, const Head& b) {
    return a.score != b.score ? a.score > b.score : a.place > b.place;
  }

  // The layer's next expert that is in the pool, from `rank` on.
  bool add(std::size_t place, std::size_t rank) {
    const learned::Layer& layer = policy_.layers_[place];
    const auto next = layer.ranking().next(rank);
    if (next) heads_.push_back({layer.values()[layer.ranking().expert(*next)] * policy_.discount(place), place, *next});
    return next.has_value();
  }

  const LearnedPolicy& policy_;
  std::vector<Head> heads_;
};

}  // namespace sparkle

// The control segment: who holds what, where every expert is, and what clients did.
//
//   page 0     Header          magic, sizes, store fingerprint, prefetch epoch, client incarnations
//              table           int32 [n_layers, n_experts]: slot of each expert, -1 if absent
//              slots           Slot [n_slots], 64 bytes each
//              rings           one event ring per client bit
//
// One daemon (prefetch) writes table, state, owner and gen; a client writes only its own bit of a mask, and its own ring.
// All atomics are lock-free and sequentially consistent: the slot protocol was checked over all interleavings with
// exactly these orders (tests/slot_model.py), and an x86 store costs nanoseconds where a read costs milliseconds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sparkle {

inline constexpr std::uint64_t kMagic = 0x314C4F4F504B5053;  // "SPKPOOL1"
inline constexpr std::uint32_t kVersion = 2;
inline constexpr std::size_t kPage = 16384;  // Apple's page; a multiple of Linux's
inline constexpr std::uint32_t kMaxClients = 16;
inline constexpr std::uint32_t kRingWords = 1u << 16;  // about 100 tokens of an 80B model between two drains
inline constexpr std::uint32_t kNoOwner = 0xFFFFFFFF;

enum SlotState : std::uint32_t { kEmpty = 0, kLoading = 1, kReady = 2, kEvicting = 3, kRetired = 4 };

struct alignas(64) Slot {
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint32_t> owner;  // layer << 16 | expert
  std::atomic<std::uint32_t> gen;  // raised when the slot is given to another expert
  std::uint32_t unused;
  std::atomic<std::uint64_t> mask;  // one bit per client incarnation that holds the slot
};
static_assert(sizeof(Slot) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

struct Incarnation {
  char name[48];  // lock file name in the run directory; empty = this bit is free
};

struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;  // words, only grows; client
  alignas(64) std::atomic<std::uint64_t> read;  // words, only grows; prefetch
  alignas(64) std::uint32_t words[kRingWords];
};

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::atomic<std::uint32_t> is_complete;  // 1 once everything below is written
  std::uint64_t segment_bytes;
  char fingerprint[72];
  std::atomic<std::uint64_t> epoch;  // of the prefetch daemon in charge
  std::uint32_t n_layers, n_experts, n_slots;
  std::atomic<std::uint32_t> wants_hints;  // 1 while the prefetch daemon has use for HintExperts
  Incarnation clients[kMaxClients];
  char layout[8192];  // JSON of the regions, written by the creator before is_complete
};
static_assert(sizeof(Header) <= kPage);

inline std::size_t round_up(std::size_t n, std::size_t step) { return (n + step - 1) / step * step; }

inline std::uint32_t owner_of(std::uint32_t layer, std::uint32_t expert) { return layer << 16 | expert; }

// Typed access to a mapped control segment. Does not own the memory.
class Control {
 public:
  static std::size_t bytes_for(std::uint32_t n_layers, std::uint32_t n_experts, std::uint32_t n_slots) {
    return rings_offset(n_layers, n_experts, n_slots) + sizeof(Ring) * kMaxClients;
  }

  // Write a fresh header over zeroed memory. `finish` makes it visible to clients.
  static Control format(std::byte* base, std::size_t n_bytes, std::uint32_t n_layers, std::uint32_t n_experts,
                        std::uint32_t n_slots, const std::string& fingerprint, const std::string& layout) {
    auto* h = reinterpret_cast<Header*>(base);
    if (n_layers >= 0xFFFF || n_experts > 0xFFFF) throw std::invalid_argument("more than 65534 layers or experts");
    if (fingerprint.size() >= sizeof h->fingerprint || layout.size() >= sizeof h->layout)
      throw std::invalid_argument("fingerprint or layout too long for the control header");
    if (n_bytes != bytes_for(n_layers, n_experts, n_slots))
      throw std::invalid_argument("control segment of wrong size");
    h->magic = kMagic;
    h->version = kVersion;
    h->segment_bytes = n_bytes;
    std::memcpy(h->fingerprint, fingerprint.c_str(), fingerprint.size() + 1);
    std::memcpy(h->layout, layout.c_str(), layout.size() + 1);
    h->n_layers = n_layers;
    h->n_experts = n_experts;
    h->n_slots = n_slots;
    Control control(base);
    for (std::size_t i = 0; i < std::size_t{n_layers} * n_experts; ++i) control.table_[i].store(-1);
    for (std::uint32_t s = 0; s < n_slots; ++s) control.slots_[s].owner.store(kNoOwner);
    return control;
  }

  // Check a segment made by someone else. Throws std::runtime_error with the reason. Only the owner's successor may
  // look into one that was never completed: to find out what its regions are called.
  static Control open(std::byte* base, std::size_t n_bytes, bool must_be_complete) {
    auto* h = reinterpret_cast<Header*>(base);
    if (n_bytes < kPage || h->magic != kMagic) throw std::runtime_error("not a Sparkle pool");
    if (h->version != kVersion) throw std::runtime_error("pool of another version of Sparkle");
    if (must_be_complete && h->is_complete.load() != 1) throw std::runtime_error("pool was never completed");
    if (h->segment_bytes != n_bytes || n_bytes != bytes_for(h->n_layers, h->n_experts, h->n_slots))
      throw std::runtime_error("pool was truncated");
    return Control(base);
  }

  Header& header() const { return *header_; }
  std::uint32_t n_slots() const { return header_->n_slots; }
  std::uint32_t n_layers() const { return header_->n_layers; }
  std::uint32_t n_experts() const { return header_->n_experts; }

  Slot& slot(std::uint32_t s) const {
    if (s >= header_->n_slots) throw std::out_of_range("slot " + std::to_string(s));
    return slots_[s];
  }
  std::atomic<std::int32_t>& table(std::uint32_t layer, std::uint32_t expert) const {
    if (layer >= header_->n_layers || expert >= header_->n_experts)
      throw std::out_of_range("expert " + std::to_string(expert) + " of layer " + std::to_string(layer));
    return table_[std::size_t{layer} * header_->n_experts + expert];
  }
  Ring& ring(std::uint32_t bit) const {
    if (bit >= kMaxClients) throw std::out_of_range("client bit " + std::to_string(bit));
    return rings_[bit];
  }

 private:
  explicit Control(std::byte* base) : header_(reinterpret_cast<Header*>(base)) {
    const auto& h = *header_;
    table_ = reinterpret_cast<std::atomic<std::int32_t>*>(base + kPage);
    slots_ = reinterpret_cast<Slot*>(base + slots_offset(h.n_layers, h.n_experts));
    rings_ = reinterpret_cast<Ring*>(base + rings_offset(h.n_layers, h.n_experts, h.n_slots));
  }
  static std::size_t slots_offset(std::size_t n_layers, std::size_t n_experts) {
    return kPage + round_up(n_layers * n_experts * sizeof(std::int32_t), 64);
  }
  static std::size_t rings_offset(std::size_t n_layers, std::size_t n_experts, std::size_t n_slots) {
    return slots_offset(n_layers, n_experts) + n_slots * sizeof(Slot);
  }

  Header* header_;
  std::atomic<std::int32_t>* table_;
  Slot* slots_;
  Ring* rings_;
};

}  // namespace sparkle

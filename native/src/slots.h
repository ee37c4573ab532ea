// The slot protocol: how a slot is read by many processes and refilled by one, and never both at once.
//
// The steps are numbered; tests/slot_model.py runs the same numbers through every interleaving.
//
//   Reader    R1  s = table[layer][expert]              none: a miss
//             R2  local_ref[s]++; was 0: mask |= bit
//             R3  state == READY, then owner == (layer, expert)?  in this order; else R4
//             R4  local_ref[s]--; now 0: mask &= ~bit     (undo, or release after the evaluation has completed)
//   Evictor   E1  READY -> EVICTING
//             E2  mask != 0: EVICTING -> READY, choose another
//             E3  table[old owner] = -1
//             E4  gen++, owner = new
//             E5  state = LOADING, then the read into the slot
//             E6  verified: mask |= bits of those who asked (a grant)
//             E7  state = READY, then table[new owner] = s
//
// Why mark-then-check (R2 before R3) is safe and check-then-mark is not: once a reader has seen READY at R3 with its
// bit set, an evictor that passes E1 afterwards sees the bit at E2; one that passed E1 before made R3 fail. From there
// on the owner stays, so it is loaded second: an owner loaded first may have gone, and READY be true of the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "control.h"

namespace sparkle {

// The evictor's side; only the prefetch daemon has one.
class Evictor {
 public:
  explicit Evictor(Control control) : control_(control) {}

  // E1-E5: give `s` (EMPTY or READY) to a new owner. False, and nothing changed, if a client holds it.
  bool begin_load(std::uint32_t s, std::uint32_t layer, std::uint32_t expert) const {
    Slot& slot = control_.slot(s);
    control_.table(layer, expert);  // range check before anything changes
    if (slot.state.load() == kRetired) throw std::logic_error("load into a retired slot: it has no memory");
    if (slot.state.load() == kReady && !vacate(slot, kEmpty)) return false;
    slot.gen.fetch_add(1);
    slot.owner.store(owner_of(layer, expert));  // E4
    slot.state.store(kLoading);                 // E5
    return true;
  }

  // E6-E7: the record is in the slot and verified.
  void publish(std::uint32_t s, std::uint64_t grants) const {
    Slot& slot = control_.slot(s);
    const std::uint32_t owner = slot.owner.load();
    if (slot.state.load() != kLoading) throw std::logic_error("publish of a slot that is not loading");
    slot.mask.fetch_or(grants);
    slot.state.store(kReady);
    control_.table(owner >> 16, owner & 0xFFFF).store(static_cast<std::int32_t>(s));
  }

  // A read that failed: the slot holds nothing.
  void abandon(std::uint32_t s) const {
    Slot& slot = control_.slot(s);
    slot.owner.store(kNoOwner);
    slot.state.store(kEmpty);
  }

  // E1-E3, then EMPTY: the slot's expert leaves. False, and nothing changed, if a client holds it or it is not READY.
  bool unload(std::uint32_t s) const {
    return control_.slot(s).state.load() == kReady && vacate(control_.slot(s), kEmpty);
  }

  // E1-E3, then RETIRED: the slot is out of use, and its memory may go. False, and nothing changed, if a client holds
  // it or a read goes to it.
  bool retire(std::uint32_t s) const {
    Slot& slot = control_.slot(s);
    return slot.state.load() != kLoading && vacate(slot, kRetired);
  }

  // Put a retired slot, whose memory is back, to use again: it is EMPTY.
  void restore(std::uint32_t s) const {
    Slot& slot = control_.slot(s);
    if (slot.state.load() != kRetired) throw std::logic_error("restore of a slot that is not retired");
    slot.state.store(kEmpty);
  }

  // Mark a READY slot for a client that asked for it. Only the evictor makes slots unready, so this can't race.
  bool grant(std::uint32_t s, std::uint64_t bits) const {
    Slot& slot = control_.slot(s);
    if (slot.state.load() != kReady) return false;
    slot.mask.fetch_or(bits);
    return true;
  }

  // Clear a dead client's bit everywhere. Call only with proof of its death. Returns how many slots it had held.
  std::uint32_t clear_client(std::uint32_t bit) const {
    std::uint32_t n = 0;
    const std::uint64_t mine = std::uint64_t{1} << bit;
    for (std::uint32_t s = 0; s < control_.n_slots(); ++s)
      if ((control_.slot(s).mask.fetch_and(~mine) & mine) != 0) ++n;
    return n;
  }

  // After a restart: decide what a slot holds. Returns true if its owner's record must be read again.
  //
  // A slot found LOADING is read again *for the same owner*: a direct read that the dead daemon had begun may still
  // land in it, and then brings the same bytes. The same holds for EVICTING once table[owner] is gone. That it does not
  // land after the slot was read again and given away is assumed: tests/slot_model.py.
  bool recover(std::uint32_t s) const {
    Slot& slot = control_.slot(s);
    const std::uint32_t state = slot.state.load(), owner = slot.owner.load();
    if (state == kRetired) return false;
    if (state == kEmpty || owner == kNoOwner) {
      abandon(s);
      return false;
    }
    auto& entry = control_.table(owner >> 16, owner & 0xFFFF);
    const bool is_listed = entry.load() == static_cast<std::int32_t>(s);
    if (state == kReady || (state == kEvicting && is_listed)) {  // died at E1-E2, or between the stores of E7
      entry.store(static_cast<std::int32_t>(s));
      slot.state.store(kReady);
      return false;
    }
    slot.state.store(kLoading);
    return true;
  }

 private:
  // E1-E3, then `after`.
  bool vacate(Slot& slot, std::uint32_t after) const {
    if (slot.state.load() == kReady) {
      slot.state.store(kEvicting);  // E1: a plain store will do, nobody else writes state
      if (slot.mask.load() != 0) {  // E2
        slot.state.store(kReady);
        return false;
      }
      const std::uint32_t old = slot.owner.load();
      if (old != kNoOwner) control_.table(old >> 16, old & 0xFFFF).store(-1);  // E3
    }
    slot.owner.store(kNoOwner);
    slot.state.store(after);
    return true;
  }

  Control control_;
};

// A client's side; one per client incarnation, used by one thread.
class Holder {
 public:
  Holder(Control control, std::uint32_t bit)
      : control_(control), bit_(std::uint64_t{1} << bit), refs_(control.n_slots(), 0) {
    if (bit >= kMaxClients) throw std::out_of_range("client bit " + std::to_string(bit));
  }

  // R1-R4: the slot of an expert, held; -1 if it is not in the pool.
  std::int32_t hold(std::uint32_t layer, std::uint32_t expert) {
    const std::int32_t entry = control_.table(layer, expert).load();  // R1
    if (entry < 0) return -1;
    const auto s = static_cast<std::uint32_t>(entry);
    Slot& slot = control_.slot(s);
    if (refs_[s]++ == 0) slot.mask.fetch_or(bit_);  // R2
    if (slot.state.load() == kReady && slot.owner.load() == owner_of(layer, expert)) return entry;  // R3
    release(s);  // R4
    return -1;
  }

  // R4. Call only after every evaluation that reads the slot has completed.
  void release(std::uint32_t s) {
    if (s >= refs_.size() || refs_[s] == 0)
      throw std::logic_error("release of slot " + std::to_string(s) + " not held");
    if (--refs_[s] == 0) control_.slot(s).mask.fetch_and(~bit_);
  }

  // Give back a grant that nobody waits for any more.
  void drop_grant(std::uint32_t s) {
    if (refs_.at(s) == 0 && (control_.slot(s).mask.load() & bit_) != 0) control_.slot(s).mask.fetch_and(~bit_);
  }

  // Clear bits that no hold stands behind: grants of a prefetch daemon that died before it could tell.
  void reconcile() {
    for (std::uint32_t s = 0; s < refs_.size(); ++s) drop_grant(s);
  }

  std::uint32_t n_held() const {
    std::uint32_t n = 0;
    for (auto r : refs_) n += r != 0;
    return n;
  }

 private:
  Control control_;
  std::uint64_t bit_;
  std::vector<std::uint32_t> refs_;
};

}  // namespace sparkle

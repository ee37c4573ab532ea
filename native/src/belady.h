// The fewest misses that any eviction policy could have had, knowing the future: Belady's rule for requests of sets.
//
// A request is a set of keys that must all be resident at once; a missing one costs 1. The victim is the key, outside
// of the request, whose next use is farthest. This is Belady 1966 ("A study of replacement algorithms for a
// virtual-storage computer") with the request's own keys as those that are used next. With `has_bypass` a key may be
// read, used and dropped without a slot, so that a request's own keys compete too, by their next use.
//
// Pure: reads its arguments, owns its memory, O(n log n) time and O(n) memory for n keys in all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace sparkle {

// Request i is keys[offsets[i], offsets[i + 1]); keys are small numbers, 0 and up: memory grows with the largest.
// Returns the misses of each request. Throws std::invalid_argument if the arguments contradict each other, and for a
// request that does not fit in the pool, unless has_bypass.
inline std::vector<std::uint32_t> belady(std::span<const std::uint32_t> keys, std::span<const std::uint64_t> offsets,
                                         std::size_t n_slots, std::span<const std::uint32_t> resident,
                                         bool has_bypass) {
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != keys.size() ||
      !std::is_sorted(offsets.begin(), offsets.end()))
    throw std::invalid_argument("offsets do not cut the keys into requests");
  constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();
  const std::size_t n = offsets.size() - 1;
  if (n >= kNever) throw std::invalid_argument("too many requests");
  std::size_t n_keys = 0;
  for (auto key : keys) n_keys = std::max(n_keys, std::size_t{key} + 1);
  for (auto key : resident) n_keys = std::max(n_keys, std::size_t{key} + 1);

  // next[j]: the first request after the one of keys[j] that uses the same key
  std::vector<std::uint32_t> next(keys.size()), soonest(n_keys, kNever);
  for (std::size_t i = n; i-- > 0;) {
    for (auto j = offsets[i]; j < offsets[i + 1]; ++j) next[j] = soonest[keys[j]];
    for (auto j = offsets[i]; j < offsets[i + 1]; ++j) soonest[keys[j]] = std::uint32_t(i);
  }

  // Farthest next use on top. A key that is used gets a new entry; its old one names a request that has passed, so it
  // lies below every valid one and is never reached while a key outside of the current request remains.
  using Entry = std::pair<std::uint32_t, std::uint32_t>;  // next use, key
  std::vector<Entry> heap;
  std::vector<bool> is_resident(n_keys);
  std::size_t n_resident = 0;
  auto push = [&](Entry entry) {
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end());
  };
  auto evict = [&] {
    std::pop_heap(heap.begin(), heap.end());
    is_resident[heap.back().second] = false;
    heap.pop_back();
    --n_resident;
  };
  for (auto key : resident) {
    if (is_resident[key]) continue;
    is_resident[key] = true;
    ++n_resident;
    push({soonest[key], key});
  }
  if (n_resident > n_slots) throw std::invalid_argument("more resident keys than slots");

  std::vector<std::uint32_t> misses(n), used_by(n_keys, kNever);
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t n_distinct = 0;
    for (auto j = offsets[i]; j < offsets[i + 1]; ++j) {
      if (used_by[keys[j]] == i) continue;  // named twice
      used_by[keys[j]] = std::uint32_t(i);
      ++n_distinct;
      misses[i] += !is_resident[keys[j]];
    }
    if (n_distinct > n_slots && !has_bypass)
      throw std::invalid_argument("a request has more keys than there are slots");
    while (!has_bypass && n_resident + misses[i] > n_slots) evict();
    for (auto j = offsets[i]; j < offsets[i + 1]; ++j) {
      if (used_by[keys[j]] != i) continue;  // named twice
      used_by[keys[j]] = kNever;
      n_resident += !is_resident[keys[j]];
      is_resident[keys[j]] = true;
      push({next[j], keys[j]});
    }
    while (n_resident > n_slots) evict();
    if (heap.size() > 2 * n_slots + 1024) {  // drop what has passed, so that memory does not grow with n
      std::erase_if(heap, [i](const Entry& entry) { return entry.first <= i; });
      std::make_heap(heap.begin(), heap.end());
    }
  }
  return misses;
}

}  // namespace sparkle

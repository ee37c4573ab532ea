// The event ring: how a client tells the policy what it used, without a message.
//
// Single producer (the client's thread), single consumer (prefetch). An event is
//   word 0: step    word 1: CLOCK_MONOTONIC in microseconds, low 32 bits    word 2: stream << 16 | rows
//   word 3: token of the last row    word 4: layer << 16 | n    words 5..n+4: expert | 1 << 31 if found resident
// Nothing is dropped: when the ring is full, `push` says so and the client waits.
#pragma once

#include <time.h>

#include <cstdint>
#include <span>
#include <vector>

#include "control.h"

namespace sparkle {

inline constexpr std::uint32_t kEventHead = 5;

struct Event {
  std::uint32_t step, time_us;
  std::uint32_t stream, rows;  // whose tokens the step computes, and how many
  std::uint32_t token;         // of the last row
  std::uint32_t layer;
  std::vector<std::uint32_t> experts;
  std::vector<bool> is_hit;
};

inline std::uint32_t now_us() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint32_t>(std::uint64_t(t.tv_sec) * 1'000'000 + std::uint64_t(t.tv_nsec) / 1000);
}

struct Origin {
  std::uint32_t step;
  std::uint16_t stream, rows;
  std::uint32_t token;
};

inline bool ring_push(Ring& ring, Origin of, std::uint32_t layer, std::span<const std::uint32_t> experts,
                      std::span<const std::int32_t> slots) {
  const std::uint64_t n_words = kEventHead + experts.size(), at = ring.written.load();
  if (n_words > kRingWords) throw std::invalid_argument("event larger than the ring");
  if (at + n_words - ring.read.load() > kRingWords) return false;
  auto put = [&](std::uint64_t i, std::uint32_t word) { ring.words[(at + i) % kRingWords] = word; };
  put(0, of.step);
  put(1, now_us());
  put(2, std::uint32_t{of.stream} << 16 | of.rows);
  put(3, of.token);
  put(4, layer << 16 | static_cast<std::uint32_t>(experts.size()));
  for (std::size_t i = 0; i < experts.size(); ++i) put(kEventHead + i, experts[i] | (slots[i] >= 0 ? 1u << 31 : 0u));
  ring.written.store(at + n_words);
  return true;
}

// Take all events up to word `limit` (or what is written, if less). Throws if the ring's words make no sense: the
// client is another process, and its bytes are not trusted.
inline std::vector<Event> ring_drain(Ring& ring, std::uint64_t limit) {
  std::vector<Event> events;
  std::uint64_t at = ring.read.load();
  const std::uint64_t written = ring.written.load(), end = limit < written ? limit : written;
  if (written < at || written - at > kRingWords) throw std::runtime_error("event ring positions are damaged");
  auto get = [&](std::uint64_t i) { return ring.words[(at + i) % kRingWords]; };
  while (at < end) {
    const std::uint32_t n = get(4) & 0xFFFF;
    if (at + kEventHead + n > written) throw std::runtime_error("event ring holds a torn event");
    Event e{get(0), get(1), get(2) >> 16, get(2) & 0xFFFF, get(3), get(4) >> 16, {}, {}};
    for (std::uint32_t i = 0; i < n; ++i) {
      e.experts.push_back(get(kEventHead + i) & 0x7FFFFFFF);
      e.is_hit.push_back((get(kEventHead + i) >> 31) != 0);
    }
    at += kEventHead + n;
    events.push_back(std::move(e));
  }
  ring.read.store(at);
  return events;
}

}  // namespace sparkle

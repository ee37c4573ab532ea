// How one record is read: straight into its spans, or through an aligned staging buffer. Shared by both readers.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "control.h"
#include "reader.h"

namespace sparkle {

inline constexpr unsigned kMaxRetries = 2;

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Page-aligned memory of its own; one per read under way, only for records that can't be read in place.
class Staging {
 public:
  explicit Staging(std::size_t n_bytes) : size_(round_up(n_bytes, kPage)) {
    data_ = static_cast<std::byte*>(std::aligned_alloc(kPage, size_));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() { std::free(data_); }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::byte* data_;
};

inline std::size_t total_bytes(const ReadJob& job) {
  std::size_t n = 0;
  for (const Span& s : job.spans) n += s.n_bytes;
  return n;
}

inline bool can_read_in_place(const ReadJob& job, std::size_t block) {
  if (!job.is_direct) return true;
  std::uint64_t at = job.offset;
  for (const Span& s : job.spans) {
    if (at % block != 0 || s.n_bytes % block != 0 || reinterpret_cast<std::uintptr_t>(s.data) % block != 0)
      return false;
    at += s.n_bytes;
  }
  return true;
}

inline void scatter(const std::byte* from, const std::vector<Span>& spans) {
  for (const Span& s : spans) {
    std::memcpy(s.data, from, s.n_bytes);
    from += s.n_bytes;
  }
}

// The reads that a job needs: its spans, or one aligned read to staging. With staging, `needed` may be less than the
// read's length: the tail belongs to the record's padding, or to nothing at the end of the file.
struct Part {
  std::byte* data;
  std::size_t n_bytes, needed;
  std::uint64_t offset;
};

inline std::vector<Part> plan(const ReadJob& job, std::size_t block, Staging* staging) {
  std::vector<Part> parts;
  if (staging == nullptr) {
    std::uint64_t at = job.offset;
    for (const Span& s : job.spans) {
      parts.push_back({s.data, s.n_bytes, s.n_bytes, at});
      at += s.n_bytes;
    }
    return parts;
  }
  if (job.offset % block != 0) throw std::invalid_argument("record does not start on a block boundary");
  const std::size_t needed = total_bytes(job);
  parts.push_back({staging->data(), round_up(needed, block), needed, job.offset});
  return parts;
}

// Account for `n` bytes just read; true when the part has all it needs. Direct reads continue on a block boundary.
inline bool advance(Part& part, std::size_t n, std::size_t block, bool is_direct) {
  if (n >= part.needed) return true;
  const std::size_t step = is_direct ? n / block * block : n;
  part.data += step;
  part.offset += step;
  part.n_bytes -= step;
  part.needed -= step;
  return false;
}

}  // namespace sparkle

// A named shared-memory object, mapped.
//
// Owns: one mapping and its file descriptor. The name is unlinked only by an explicit call of its creator.
// Space is reserved by `create`, or by `reserve` in a sparse object: a full /dev/shm fails there with ENOSPC, never
// later with SIGBUS. Touching what is not reserved takes that risk back: pages in no one's use must not even be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace sparkle {

// Whether `discard` gives memory back. macOS has no call for it: there a region goes back whole, by being unlinked.
#ifdef __linux__
inline constexpr bool kCanDiscard = true;
#else
inline constexpr bool kCanDiscard = false;
#endif

// A descriptor that is closed on every way out.
class Fd {
 public:
  explicit Fd(int value) : value_(value) {}
  Fd(Fd&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Fd& operator=(Fd&&) = delete;
  ~Fd();
  int get() const { return value_; }

 private:
  int value_;
};

class Mapping {
 public:
  // Create `name` (must not exist) with `n_bytes` bytes, all zero. Throws std::system_error.
  static Mapping create(const std::string& name, std::size_t n_bytes);
  // The same without memory behind it: `reserve` what will be used.
  static Mapping create_sparse(const std::string& name, std::size_t n_bytes);
  // Map an existing object whole. Throws std::system_error.
  static Mapping attach(const std::string& name);
  // Remove a name; existing mappings stay valid. False if it did not exist.
  static bool unlink(const std::string& name);

  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  Mapping(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Put memory behind every page that the range touches; what is there already keeps its content. Throws
  // std::system_error with ENOSPC if shared memory is full, and nothing is reserved then; std::out_of_range.
  // A control group's limit is no such error: beyond it the kernel kills. Who reserves looks at the limit first.
  void reserve(std::size_t offset, std::size_t n_bytes);
  // Give back the pages that lie whole in the range, in every process that maps them; they read as zero after a new
  // `reserve`. Returns the bytes given back. No read into them may be under way, and none may be pinned (registered
  // with io_uring): a pinned page stays allocated, apart from the object. Throws std::system_error (ENOTSUP unless
  // kCanDiscard), std::out_of_range.
  std::size_t discard(std::size_t offset, std::size_t n_bytes);
  // Bytes that have memory behind them.
  std::size_t backed() const;

 private:
  Mapping(Fd fd, std::size_t size, const std::string& name);
  void check(std::size_t offset, std::size_t n_bytes) const;

  Fd fd_;
  std::byte* data_;
  std::size_t size_;
};

}  // namespace sparkle

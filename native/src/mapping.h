// A named shared-memory object, mapped.
//
// Owns: one mapping and its file descriptor. The name is unlinked only by an explicit call of its creator.
// Space is reserved at creation: a full /dev/shm fails here with ENOSPC, never later with SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sparkle {

class Mapping {
 public:
  // Create `name` (must not exist) with `n_bytes` bytes, all zero. Throws std::system_error.
  static Mapping create(const std::string& name, std::size_t n_bytes);
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

 private:
  Mapping(std::byte* data, std::size_t size) : data_(data), size_(size) {}
  std::byte* data_;
  std::size_t size_;
};

}  // namespace sparkle

#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace sparkle {
namespace {

constexpr std::size_t kStatBlock = 512;  // st_blocks counts these, whatever the size of a page

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

struct stat stat_of(const Fd& fd) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) fail(errno, "fstat");
  return info;
}

}  // namespace

Fd::~Fd() {
  if (value_ >= 0) ::close(value_);
}

Mapping Mapping::create(const std::string& name, std::size_t n_bytes) {
  Mapping mapping = create_sparse(name, n_bytes);
  try {
    mapping.reserve(0, n_bytes);
    return mapping;
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

Mapping Mapping::create_sparse(const std::string& name, std::size_t n_bytes) {
  Fd fd(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600));
  if (fd.get() < 0) fail(errno, "shm_open " + name);
  try {
    if (::ftruncate(fd.get(), static_cast<off_t>(n_bytes)) != 0) fail(errno, "ftruncate " + name);
    return Mapping(std::move(fd), n_bytes, name);
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

Mapping Mapping::attach(const std::string& name) {
  Fd fd(::shm_open(name.c_str(), O_RDWR, 0600));
  if (fd.get() < 0) fail(errno, "shm_open " + name);
  const auto n_bytes = static_cast<std::size_t>(stat_of(fd).st_size);
  if (n_bytes == 0) fail(ENODATA, "empty shared memory " + name);
  return Mapping(std::move(fd), n_bytes, name);
}

bool Mapping::unlink(const std::string& name) {
  if (::shm_unlink(name.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  fail(errno, "shm_unlink " + name);
}

void Mapping::reserve(std::size_t offset, std::size_t n_bytes) {
  check(offset, n_bytes);
  if (n_bytes == 0) return;  // posix_fallocate refuses it
#ifndef __APPLE__  // whose shared memory is not a file system of fixed size: there is no later SIGBUS to guard against
  int error;
  do {
    error = ::posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
  } while (error == EINTR);
  if (error != 0) fail(error, "posix_fallocate");
#endif
}

std::size_t Mapping::discard(std::size_t offset, std::size_t n_bytes) {
  check(offset, n_bytes);
#ifdef __linux__
  // The system would zero the rest of a page that lies only partly in the range: it may belong to a neighbour in use.
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = (offset + page - 1) / page * page;
  const std::size_t end = (offset + n_bytes) / page * page;
  if (begin >= end) return 0;
  const std::size_t before = backed();
  int result;
  do {
    result = ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                         static_cast<off_t>(end - begin));
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail(errno, "fallocate");
  const std::size_t after = backed();
  return before > after ? before - after : 0;
#else
  fail(ENOTSUP, "this system cannot give back a part of a shared memory object");
#endif
}

std::size_t Mapping::backed() const { return static_cast<std::size_t>(stat_of(fd_).st_blocks) * kStatBlock; }

void Mapping::check(std::size_t offset, std::size_t n_bytes) const {
  if (offset > size_ || n_bytes > size_ - offset) throw std::out_of_range("range beyond the mapping");
}

Mapping::Mapping(Fd fd, std::size_t size, const std::string& name) : fd_(std::move(fd)), data_(nullptr), size_(size) {
  void* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (p == MAP_FAILED) fail(errno, "mmap " + name);
  data_ = static_cast<std::byte*>(p);
}

Mapping::Mapping(Mapping&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace sparkle

#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace sparkle {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// A descriptor that is closed on every way out; a mapping does not need it once made.
struct Fd {
  int value;
  ~Fd() {
    if (value >= 0) ::close(value);
  }
};

std::byte* map(int fd, std::size_t n_bytes, const std::string& name) {
  void* p = ::mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) fail(errno, "mmap " + name);
  return static_cast<std::byte*>(p);
}

void reserve(int fd, std::size_t n_bytes) {
#ifdef __APPLE__
  // macOS has no fallocate for shared memory, and allows one ftruncate per object; its shared memory is not a
  // file system of fixed size, so there is no later SIGBUS to guard against.
  if (::ftruncate(fd, static_cast<off_t>(n_bytes)) != 0) fail(errno, "ftruncate");
#else
  int error;
  do {
    error = ::posix_fallocate(fd, 0, static_cast<off_t>(n_bytes));
  } while (error == EINTR);
  if (error != 0) fail(error, "posix_fallocate");
#endif
}

}  // namespace

Mapping Mapping::create(const std::string& name, std::size_t n_bytes) {
  Fd fd{::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600)};
  if (fd.value < 0) fail(errno, "shm_open " + name);
  try {
    reserve(fd.value, n_bytes);
    return Mapping(map(fd.value, n_bytes, name), n_bytes);
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

Mapping Mapping::attach(const std::string& name) {
  Fd fd{::shm_open(name.c_str(), O_RDWR, 0600)};
  if (fd.value < 0) fail(errno, "shm_open " + name);
  struct stat info{};
  if (::fstat(fd.value, &info) != 0) fail(errno, "fstat " + name);
  const auto n_bytes = static_cast<std::size_t>(info.st_size);
  if (n_bytes == 0) fail(ENODATA, "empty shared memory " + name);
  return Mapping(map(fd.value, n_bytes, name), n_bytes);
}

bool Mapping::unlink(const std::string& name) {
  if (::shm_unlink(name.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  fail(errno, "shm_unlink " + name);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace sparkle

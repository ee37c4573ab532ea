// A disk that misbehaves, as a library to preload: what `pread` does follows the variable FAULTY_PREAD.
//
//   short    never more than a third of what was asked for; direct reads in whole blocks, as the kernel gives them
//   eintr    every other call is interrupted
//   eio      every call fails with EIO; eio:3 only the first three
//
// Calls are counted from when the variable was changed last, which must not happen while a read is under way.
// Built and used by tests/unit/test_reader.py.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

extern "C" ssize_t pread(int fd, void* data, size_t n_bytes, off_t offset) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, void*, size_t, off_t)>(::dlsym(RTLD_NEXT, "pread"));
  static std::mutex mutex;
  static std::string current;
  static unsigned n_calls = 0;
  constexpr size_t kBlock = 4096;
  const char* fault = std::getenv("FAULTY_PREAD");
  if (fault == nullptr) return real(fd, data, n_bytes, offset);
  unsigned call;
  {
    std::lock_guard lock(mutex);
    if (current != fault) n_calls = 0;
    current = fault;
    call = n_calls++;
  }
  if (std::strcmp(fault, "short") == 0) {
    const bool is_direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    const size_t third = n_bytes / 3, least = is_direct ? std::min(kBlock, n_bytes) : 1;
    return real(fd, data, std::max(is_direct ? third / kBlock * kBlock : third, least), offset);
  }
  if (std::strcmp(fault, "eintr") == 0 && call % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  if (std::strncmp(fault, "eio", 3) == 0 && (fault[3] == '\0' || call < std::strtoul(fault + 4, nullptr, 10))) {
    errno = EIO;
    return -1;
  }
  return real(fd, data, n_bytes, offset);
}

// What the same call is named where files may be large.
extern "C" ssize_t pread64(int fd, void* data, size_t n_bytes, off_t offset) {
  return pread(fd, data, n_bytes, offset);
}

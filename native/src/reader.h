// Reads records from files into the caller's memory, many at a time.
//
// Owns: the ring or the threads, and staging buffers. Never owns the destination: the caller keeps it mapped and unused
// until the read's completion has been reaped. One thread calls submit and reap; `event_fd` becomes readable when there
// is something to reap.
//
// A record lies in one piece in the file and is scattered to one span per piece. With direct I/O, spans go straight to
// memory where offset, address and length are all multiples of the device's block; else one aligned read goes to a
// staging buffer and is copied. Short reads are continued; EINTR is invisible; EIO is tried again twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sparkle {

struct Span {
  std::byte* data;
  std::size_t n_bytes;
};

struct Completion {
  std::uint64_t tag;
  int error;  // 0, or an errno value; ENODATA: the file ended early
  double seconds;
  std::uint32_t n_retries;
};

struct ReadJob {
  std::uint64_t tag;
  int fd;
  std::uint64_t offset;
  std::vector<Span> spans;
  bool is_direct;  // fd was opened for direct I/O
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Start a read. At most `depth` may be under way. Throws std::logic_error beyond.
  virtual void submit(ReadJob job) = 0;
  virtual std::vector<Completion> reap() = 0;
  virtual int event_fd() const = 0;
  virtual std::string name() const = 0;
  // Tell the kernel of memory that reads will go to (io_uring fixed buffers), by address, in the place of what it was
  // told before.
  // Such memory is pinned: before any of it is given back, call this with nothing. False if the kernel refuses; reads
  // work all the same.
  virtual bool register_memory(const std::vector<Span>&) { return false; }
  // Keep the file of `fd` open for as long as a read may still write to memory, also after this process was killed. With
  // the fd of a lock: who gets the lock knows that no read of its last holder is under way. Throws std::system_error.
  // Threads need nothing of the kind: the kernel ends a process only after its system calls.
  virtual void keep_open(int) {}

  // depth: reads under way at once. block_bytes: alignment that direct I/O needs. record_bytes: largest record.
  static std::unique_ptr<Reader> with_threads(unsigned depth, std::size_t block_bytes, std::size_t record_bytes);
  // Throws std::system_error if the kernel or a sandbox forbids io_uring (or this is not Linux).
  static std::unique_ptr<Reader> with_uring(unsigned depth, std::size_t block_bytes, std::size_t record_bytes);
};

}  // namespace sparkle

// Both record readers under sanitizers: many reads at once, of every shape, and a reader that is destroyed while busy.
//
//   reader_test FILE     FILE is created, on the file system whose direct I/O is to be tried
//
// The bytes that arrive are compared with a formula. What each shape must give is tested from Python
// (tests/unit/test_reader.py); this is about memory: overruns, lifetimes, races. Run by tests/ipc/test_slot_stress.py.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "../src/read_plan.h"
#include "../src/reader.h"

using namespace sparkle;

namespace {

constexpr std::size_t kFileBytes = 1 << 20, kRecordBytes = 160 << 10, kBlock = 4096;
constexpr unsigned kDepth = 4;

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "reader_test: %s\n", what.c_str());
  std::_Exit(1);
}

std::byte byte_at(std::size_t i) { return static_cast<std::byte>((i * 2654435761u) >> 13); }

void write_file(const char* path) {
  std::vector<std::byte> bytes(kFileBytes);
  for (std::size_t i = 0; i < kFileBytes; ++i) bytes[i] = byte_at(i);
  const int fd = ::open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
  if (fd < 0 || ::write(fd, bytes.data(), kFileBytes) != static_cast<ssize_t>(kFileBytes)) die("cannot write the file");
  ::close(fd);
}

using Memory = std::unique_ptr<std::byte, decltype(&std::free)>;

// A read under way, and the memory that it fills: block-aligned, and not a block longer than needed.
struct Pending {
  Memory memory;
  ReadJob job;
};

Pending make(std::minstd_rand& random, std::uint64_t tag, int fd, bool is_direct, bool is_aligned) {
  std::vector<std::size_t> sizes(1 + random() % 20);  // at times more pieces than go into a ring as they are
  std::size_t n_bytes = 0, at = 0;
  for (std::size_t& size : sizes) n_bytes += size = (1 + random() % 2) * (is_aligned ? kBlock : 64);
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(kBlock, round_up(n_bytes, kBlock))), &std::free);
  Pending p{std::move(memory), {tag, fd, random() % (kFileBytes / kBlock) * kBlock, {}, is_direct}};
  for (const std::size_t size : sizes) {
    p.job.spans.push_back({p.memory.get() + at, size});
    at += size;
  }
  return p;
}

void check(const Pending& p, const Completion& c) {
  const bool fits = p.job.offset + total_bytes(p.job) <= kFileBytes;
  const int expected = fits ? 0 : ENODATA;
  if (c.error != expected) die("error " + std::to_string(c.error) + ", expected " + std::to_string(expected));
  std::size_t at = p.job.offset;
  for (const Span& s : p.job.spans)
    for (std::size_t i = 0; fits && i < s.n_bytes; ++i)
      if (s.data[i] != byte_at(at++)) die("wrong byte");
}

void run(Reader& reader, int fd, bool is_direct, unsigned seed) {
  std::minstd_rand random(seed);
  std::map<std::uint64_t, Pending> pending;
  std::uint64_t tag = 0;
  while (tag < 200 || !pending.empty()) {
    while (pending.size() < kDepth && tag < 200) {
      Pending p = make(random, ++tag, fd, is_direct, random() % 2 == 0);
      reader.submit(p.job);
      pending.emplace(tag, std::move(p));
    }
    pollfd p{reader.event_fd(), POLLIN, 0};
    if (::poll(&p, 1, 10000) != 1) die("a read does not end");
    for (const Completion& c : reader.reap()) {
      check(pending.at(c.tag), c);
      pending.erase(c.tag);
    }
  }
}

void run_all(const char* path, std::unique_ptr<Reader> (*engine)(unsigned, std::size_t, std::size_t)) {
  for (const bool is_direct : {false, true}) {
    const int fd = ::open(path, O_RDONLY | (is_direct ? O_DIRECT : 0));
    if (fd < 0 && is_direct) continue;  // this file system can't
    const std::size_t block = is_direct ? kBlock : 1;
    run(*engine(kDepth, block, kRecordBytes), fd, is_direct, 1 + is_direct);
    std::minstd_rand random(7);
    std::vector<Pending> left;
    std::unique_ptr<Reader> reader = engine(kDepth, block, kRecordBytes);
    for (unsigned i = 0; i < kDepth; ++i) left.push_back(make(random, i, fd, is_direct, true));
    for (const Pending& p : left) reader->submit(p.job);
    reader.reset();  // waits for the reads: only then may memory and file go
    ::close(fd);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) die("usage: reader_test FILE");
  write_file(argv[1]);
  run_all(argv[1], &Reader::with_threads);
  try {
    run_all(argv[1], &Reader::with_uring);
  } catch (const std::system_error& e) {
    std::printf("io_uring not tried: %s\n", e.what());
  }
  return 0;
}

#include "reader.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "read_plan.h"

#ifdef __linux__
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#endif

#ifdef __APPLE__
#include <pthread/qos.h>
#endif

namespace sparkle {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Wakes a poll loop: an eventfd on Linux, a pipe elsewhere.
class Event {
 public:
  Event() {
#ifdef __linux__
    fds_[0] = fds_[1] = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fds_[0] < 0) fail("eventfd");
#else
    if (::pipe(fds_) != 0) fail("pipe");
    for (int fd : fds_) {
      ::fcntl(fd, F_SETFL, O_NONBLOCK);
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
#endif
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    ::close(fds_[0]);
    if (fds_[1] != fds_[0]) ::close(fds_[1]);
  }
  int fd() const { return fds_[0]; }
  void set() const {
    const std::uint64_t one = 1;
    // A full pipe or counter is already readable: that is all a set has to achieve.
    [[maybe_unused]] const ssize_t n = ::write(fds_[1], &one, sizeof one);
  }
  void clear() const {
    std::uint64_t buffer[8];
    while (::read(fds_[0], buffer, sizeof buffer) > 0) {
    }
  }

 private:
  int fds_[2];
};

class ThreadReader final : public Reader {
 public:
  ThreadReader(unsigned depth, std::size_t block, std::size_t record_bytes) : depth_(depth), block_(block) {
    for (unsigned i = 0; i < depth; ++i) threads_.emplace_back([this, record_bytes] { work(record_bytes); });
  }
  ~ThreadReader() override {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    wanted_.notify_all();
    for (auto& t : threads_) t.join();
  }

  void submit(ReadJob job) override {
    {
      std::lock_guard lock(mutex_);
      if (n_in_flight_ >= depth_) throw std::logic_error("more reads than the reader's depth");
      ++n_in_flight_;
      queue_.push_back(std::move(job));
    }
    wanted_.notify_one();
  }

  std::vector<Completion> reap() override {
    event_.clear();
    std::lock_guard lock(mutex_);
    n_in_flight_ -= static_cast<unsigned>(done_.size());
    return std::exchange(done_, {});
  }

  int event_fd() const override { return event_.fd(); }
  std::string name() const override { return "threads"; }

 private:
  void work(std::size_t record_bytes) {
#ifdef __APPLE__
    // Background threads get throttled I/O on macOS; a demand read is what the user waits for.
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#endif
    std::unique_ptr<Staging> staging;  // made when first needed
    for (;;) {
      ReadJob job;
      {
        std::unique_lock lock(mutex_);
        wanted_.wait(lock, [this] { return is_stopping_ || !queue_.empty(); });
        if (is_stopping_) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      const Completion c = read(job, staging, record_bytes);
      {
        std::lock_guard lock(mutex_);
        done_.push_back(c);
      }
      event_.set();
    }
  }

  Completion read(const ReadJob& job, std::unique_ptr<Staging>& staging, std::size_t record_bytes) const {
    const double began = now_s();
    Completion c{job.tag, 0, 0, 0};
    try {
      Staging* stage = nullptr;
      if (!can_read_in_place(job, block_)) {
        if (!staging) staging = std::make_unique<Staging>(std::max(record_bytes, total_bytes(job)));
        stage = staging.get();
      }
      for (Part& part : plan(job, block_, stage))
        if ((c.error = read_part(job, part, c.n_retries)) != 0) break;
      if (c.error == 0 && stage != nullptr) scatter(stage->data(), job.spans);
    } catch (const std::bad_alloc&) {
      c.error = ENOMEM;
    } catch (const std::exception&) {
      c.error = EINVAL;
    }
    c.seconds = now_s() - began;
    return c;
  }

  int read_part(const ReadJob& job, Part& part, std::uint32_t& n_retries) const {
    for (;;) {
      const ssize_t n = ::pread(job.fd, part.data, part.n_bytes, static_cast<off_t>(part.offset));
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EIO && n_retries < kMaxRetries) {
          ++n_retries;
          continue;
        }
        return errno;
      }
      if (n == 0) return ENODATA;
      const bool was_progress = !job.is_direct || static_cast<std::size_t>(n) >= block_;
      if (advance(part, static_cast<std::size_t>(n), block_, job.is_direct)) return 0;
      if (!was_progress) return ENODATA;
    }
  }

  const unsigned depth_;
  const std::size_t block_;
  Event event_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<ReadJob> queue_;
  std::vector<Completion> done_;
  unsigned n_in_flight_ = 0;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

#ifdef __linux__

// io_uring by its system calls: three mappings, two rings of indices. See io_uring(7).
class UringReader final : public Reader {
 public:
  UringReader(unsigned depth, std::size_t block, std::size_t record_bytes)
      : depth_(depth), block_(block), record_bytes_(record_bytes) {
    io_uring_params params{};
    const unsigned n_entries = depth * kMaxParts;
    ring_fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, n_entries, &params));
    if (ring_fd_ < 0) fail("io_uring_setup");
    try {
      map_rings(params);
      const int fd = event_.fd();
      if (::syscall(__NR_io_uring_register, ring_fd_, IORING_REGISTER_EVENTFD, &fd, 1) < 0)
        fail("IORING_REGISTER_EVENTFD");
    } catch (...) {
      close_ring();
      throw;
    }
  }

  ~UringReader() override {
    // The kernel may still write into the caller's memory: wait for what is under way.
    while (!jobs_.empty()) {
      pollfd p{event_.fd(), POLLIN, 0};
      if (::poll(&p, 1, 5000) == 0) break;
      reap();
    }
    close_ring();
  }

  void submit(ReadJob job) override {
    if (jobs_.size() >= depth_) throw std::logic_error("more reads than the reader's depth");
    Running r{std::move(job), nullptr, {}, 0, {}, now_s()};
    const bool is_in_place = r.job.spans.size() <= kMaxParts && can_read_in_place(r.job, block_);
    if (!is_in_place) r.staging = take_staging(total_bytes(r.job));
    r.parts = plan(r.job, block_, r.staging.get());
    r.n_open = static_cast<unsigned>(r.parts.size());
    r.result = {r.job.tag, 0, 0, 0};
    const std::uint64_t id = next_id_++;
    Running& kept = jobs_.emplace(id, std::move(r)).first->second;
    for (unsigned i = 0; i < kept.parts.size(); ++i) push(id, i, kept);
    enter();
  }

  std::vector<Completion> reap() override {
    event_.clear();
    std::vector<Completion> done;
    unsigned head = *cq_head_;
    while (head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) {
      const io_uring_cqe& cqe = cqes_[head & *cq_mask_];
      complete(cqe.user_data / kMaxParts, static_cast<unsigned>(cqe.user_data % kMaxParts), cqe.res, done);
      std::atomic_ref(*cq_head_).store(++head, std::memory_order_release);
    }
    enter();  // continued reads
    return done;
  }

  bool register_memory(const std::vector<Span>& spans) override {
    if (!fixed_.empty()) ::syscall(__NR_io_uring_register, ring_fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
    fixed_.clear();
    if (spans.empty()) return true;
    constexpr std::size_t kMaxBuffer = std::size_t{1} << 30;  // the kernel's limit for one fixed buffer
    std::vector<iovec> buffers;
    for (const Span& s : spans) {
      if (s.n_bytes > kMaxBuffer) return false;
      buffers.push_back({s.data, s.n_bytes});
    }
    if (!std::is_sorted(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.data < b.data; }))
      throw std::invalid_argument("memory to register is not in order of its addresses");
    // Fails with ENOMEM where RLIMIT_MEMLOCK is small, as it is for most users: then reads go unregistered.
    if (::syscall(__NR_io_uring_register, ring_fd_, IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) < 0)
      return false;
    fixed_ = spans;
    return true;
  }

  void keep_open(int fd) override {
    // A registered file is let go when the ring is freed, and that waits for every read (io_uring_register(2)).
    if (::syscall(__NR_io_uring_register, ring_fd_, IORING_REGISTER_FILES, &fd, 1) < 0) fail("IORING_REGISTER_FILES");
  }

  int event_fd() const override { return event_.fd(); }
  std::string name() const override { return fixed_.empty() ? "io_uring" : "io_uring, registered buffers"; }

 private:
  static constexpr unsigned kMaxParts = 16;  // pieces read in place: 9 for affine weights, 12 with biases; else staged

  struct Running {
    ReadJob job;
    std::unique_ptr<Staging> staging;
    std::vector<Part> parts;
    unsigned n_open;
    Completion result;
    double began;
  };

  void map_rings(const io_uring_params& p) {
    if ((p.features & IORING_FEAT_SINGLE_MMAP) == 0) {
      errno = ENOSYS;
      fail("io_uring of a kernel older than 5.4");
    }
    const std::size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    const std::size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = std::max(sq, cq);
    sqes_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
    sqes_ = static_cast<io_uring_sqe*>(map(sqes_bytes_, IORING_OFF_SQES));
    auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<std::byte*>(rings_) + offset); };
    sq_tail_ = at(p.sq_off.tail);
    sq_mask_ = at(p.sq_off.ring_mask);
    sq_array_ = at(p.sq_off.array);
    cq_head_ = at(p.cq_off.head);
    cq_tail_ = at(p.cq_off.tail);
    cq_mask_ = at(p.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<std::byte*>(rings_) + p.cq_off.cqes);
  }

  void* map(std::size_t n_bytes, std::uint64_t offset) const {
    void* p = ::mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd_,
                     static_cast<off_t>(offset));
    if (p == MAP_FAILED) fail("mmap of io_uring");
    return p;
  }

  void close_ring() {
    if (sqes_ != nullptr) ::munmap(sqes_, sqes_bytes_);
    if (rings_ != nullptr) ::munmap(rings_, rings_bytes_);
    ::close(ring_fd_);
  }

  std::unique_ptr<Staging> take_staging(std::size_t n_bytes) {
    if (!spare_.empty() && spare_.back()->size() >= n_bytes) {
      auto s = std::move(spare_.back());
      spare_.pop_back();
      return s;
    }
    return std::make_unique<Staging>(std::max(n_bytes, record_bytes_));
  }

  void push(std::uint64_t id, unsigned i, const Running& r) {
    const Part& part = r.parts[i];
    const unsigned tail = *sq_tail_, slot = tail & *sq_mask_;
    io_uring_sqe& sqe = sqes_[slot];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = IORING_OP_READ;
    sqe.fd = r.job.fd;
    sqe.off = part.offset;
    sqe.addr = reinterpret_cast<std::uint64_t>(part.data);
    sqe.len = static_cast<unsigned>(part.n_bytes);
    sqe.user_data = id * kMaxParts + i;
    if (const int buffer = fixed_buffer(part); buffer >= 0) {
      sqe.opcode = IORING_OP_READ_FIXED;
      sqe.buf_index = static_cast<std::uint16_t>(buffer);
    }
    sq_array_[slot] = slot;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++n_to_submit_;
  }

  int fixed_buffer(const Part& part) const {
    const auto after = std::upper_bound(fixed_.begin(), fixed_.end(), part.data,
                                        [](const std::byte* at, const Span& s) { return at < s.data; });
    if (after == fixed_.begin()) return -1;
    const Span& s = *(after - 1);
    return part.data + part.n_bytes <= s.data + s.n_bytes ? static_cast<int>(after - 1 - fixed_.begin()) : -1;
  }

  void enter() {
    while (n_to_submit_ > 0) {
      const long n = ::syscall(__NR_io_uring_enter, ring_fd_, n_to_submit_, 0, 0, nullptr, 0);
      if (n >= 0) {
        n_to_submit_ -= static_cast<unsigned>(n);
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        fail("io_uring_enter");
      }
    }
  }

  void complete(std::uint64_t id, unsigned i, int res, std::vector<Completion>& done) {
    Running& r = jobs_.at(id);
    Part& part = r.parts[i];
    const bool may_retry = res == -EIO && r.result.n_retries < kMaxRetries;
    if (res == -EINTR || res == -EAGAIN || may_retry) {
      r.result.n_retries += may_retry ? 1 : 0;
      push(id, i, r);
      return;
    }
    if (res > 0 && !advance(part, static_cast<std::size_t>(res), block_, r.job.is_direct)) {
      if (!r.job.is_direct || static_cast<std::size_t>(res) >= block_) {
        push(id, i, r);
        return;
      }
      res = 0;
    }
    if (res <= 0 && r.result.error == 0) r.result.error = res == 0 ? ENODATA : -res;
    if (--r.n_open == 0) finish(id, r, done);
  }

  void finish(std::uint64_t id, Running& r, std::vector<Completion>& done) {
    if (r.staging) {
      if (r.result.error == 0) scatter(r.staging->data(), r.job.spans);
      spare_.push_back(std::move(r.staging));
    }
    r.result.seconds = now_s() - r.began;
    done.push_back(r.result);
    jobs_.erase(id);
  }

  const unsigned depth_;
  const std::size_t block_, record_bytes_;
  Event event_;
  int ring_fd_ = -1;
  void* rings_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  std::size_t rings_bytes_ = 0, sqes_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_mask_ = nullptr, *sq_array_ = nullptr;
  unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr, *cq_mask_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned n_to_submit_ = 0;
  std::uint64_t next_id_ = 1;
  std::unordered_map<std::uint64_t, Running> jobs_;
  std::vector<std::unique_ptr<Staging>> spare_;
  std::vector<Span> fixed_;
};

#endif  // __linux__

}  // namespace

std::unique_ptr<Reader> Reader::with_threads(unsigned depth, std::size_t block_bytes, std::size_t record_bytes) {
  return std::make_unique<ThreadReader>(depth, block_bytes, record_bytes);
}

std::unique_ptr<Reader> Reader::with_uring([[maybe_unused]] unsigned depth, [[maybe_unused]] std::size_t block_bytes,
                                           [[maybe_unused]] std::size_t record_bytes) {
#ifdef __linux__
  return std::make_unique<UringReader>(depth, block_bytes, record_bytes);
#else
  errno = ENOSYS;
  fail("io_uring exists on Linux only");
#endif
}

}  // namespace sparkle

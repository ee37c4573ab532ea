// Workers: threads that share out the parts of one job at a time, with the thread that has the job.
//
// Owns its threads. An idle worker looks for work for a short while (`spin`), then sleeps: on a machine whose cores
// others want too, a worker that spins takes time from the one that computes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace sparkle {

class Workers {
 public:
  // `n_threads` in all, the caller's included.
  Workers(int n_threads, std::chrono::microseconds spin) : spin_(spin) {
    for (int i = 1; i < n_threads; ++i) threads_.emplace_back([this, i] { work(i); });
  }

  ~Workers() {
    is_ending_.store(true);
    job_.fetch_add(kGeneration);
    job_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int n_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Call part(i, thread) once for each i in [0, n), 0 <= thread < n_threads(); return when all have returned. For one
  // caller at a time; `part` must not throw.
  template <class Part>
  void run(std::uint32_t n, const Part& part) {
    std::uint32_t first = 0;
    for (; n - first > kParts; first += kParts)
      run_some(kParts, [&](std::uint32_t i, int thread) { part(first + i, thread); });
    run_some(n - first, [&](std::uint32_t i, int thread) { part(first + i, thread); });
  }

 private:
  template <class Part>
  void run_some(std::uint32_t n, const Part& part) {
    if (n <= 1 || threads_.empty()) {
      for (std::uint32_t i = 0; i < n; ++i) part(i, 0);
      return;
    }
    call_ = [](const void* with, std::uint32_t i, int thread) { (*static_cast<const Part*>(with))(i, thread); };
    with_ = &part;
    n_done_.store(0, std::memory_order_relaxed);
    const std::uint64_t generation = (job_.load(std::memory_order_relaxed) / kGeneration + 1) * kGeneration;
    job_.store(generation | std::uint64_t{n} << kPartBits);
    if (n_asleep_.load() > 0) job_.notify_all();
    std::uint64_t seen = job_.load();
    while (take(seen, 0)) {
    }
    for (std::uint32_t done = n_done_.load(); done != n; done = n_done_.load()) pause(done);
  }

  // One word says which job it is, how many parts it has and which is the next: a worker that comes late can't take a
  // part of the wrong job.
  static constexpr int kPartBits = 16;
  static constexpr std::uint32_t kParts = (1U << kPartBits) - 1;
  static constexpr std::uint64_t kGeneration = std::uint64_t{1} << (2 * kPartBits);

  // Do the next part of the job, if one is left.
  bool take(std::uint64_t& seen, int thread) {
    while (true) {
      const std::uint32_t next = seen & kParts, n = seen >> kPartBits & kParts;
      if (next >= n) return false;
      if (!job_.compare_exchange_weak(seen, seen + 1)) continue;
      call_(with_, next, thread);
      if (n_done_.fetch_add(1) + 1 == n) n_done_.notify_one();
      seen = job_.load();
      return true;
    }
  }

  void work(int thread) {
    std::uint64_t seen = job_.load();
    while (!is_ending_.load()) {
      if (take(seen, thread)) continue;
      const auto end = std::chrono::steady_clock::now() + spin_;
      std::uint64_t now = job_.load();
      while (now == seen && std::chrono::steady_clock::now() < end) {
        relax();
        now = job_.load();
      }
      if (now == seen) {
        n_asleep_.fetch_add(1);
        job_.wait(seen);
        n_asleep_.fetch_sub(1);
        now = job_.load();
      }
      seen = now;
    }
  }

  // Others finish their last parts.
  void pause(std::uint32_t done) {
    const auto end = std::chrono::steady_clock::now() + spin_;
    while (n_done_.load() == done) {
      if (std::chrono::steady_clock::now() >= end) {
        n_done_.wait(done);
        return;
      }
      relax();
    }
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const std::chrono::microseconds spin_;
  std::atomic<std::uint64_t> job_{0};
  std::atomic<std::uint32_t> n_done_{0};
  std::atomic<int> n_asleep_{0};
  std::atomic<bool> is_ending_{false};
  void (*call_)(const void*, std::uint32_t, int) = nullptr;
  const void* with_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace sparkle

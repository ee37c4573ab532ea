// The slot protocol and the event ring under fire; built with sanitizers and run by tests/ipc/test_slot_stress.py.
//
//   slot_stress threads     one evictor, several readers; every use checks the whole payload
//   slot_stress ring        one producer, one consumer; nothing lost, nothing out of order
//   slot_stress processes   readers and evictors are processes that get killed; bits are cleared once death is proved
//
// Payloads are plain memory: an access that the protocol lets through too early is a data race for ThreadSanitizer, and
// wrong words for everyone else. Exit code 0, or a line on stderr and 1.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../src/control.h"
#include "../src/mapping.h"
#include "../src/ring.h"
#include "../src/slots.h"

using namespace sparkle;

namespace {

constexpr std::uint32_t kLayers = 2, kExperts = 4, kSlots = 3, kReaders = 4;
constexpr std::size_t kWords = 128;  // payload of a slot: long enough to be caught half written

std::atomic<bool>* failed = nullptr;  // tells the parent of a child that fails

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "slot_stress: %s\n", what.c_str());
  if (failed != nullptr) *failed = true;
  std::_Exit(1);
}

struct Payload {
  std::uint64_t words[kSlots][kWords];
};

std::uint64_t word_of(std::uint32_t layer, std::uint32_t expert) {
  return 0x9E3779B97F4A7C15u * (layer * kExperts + expert + 1);
}

// What prefetch does with one slot: evict, read, publish; sometimes the read fails, sometimes a client gets a grant.
class Prefetch {
 public:
  Prefetch(Control control, Payload* payload, unsigned seed)
      : control_(control), evictor_(control), payload_(payload), random_(seed) {}

  unsigned turn() {
    const std::uint32_t s = random_() % kSlots, layer = random_() % kLayers, expert = random_() % kExperts;
    if (control_.table(layer, expert).load() >= 0 || !evictor_.begin_load(s, layer, expert)) return 0;
    random_() % 16 == 0 ? evictor_.abandon(s) : read(s);
    return 0;
  }

  void leave() const {}

  void recover() {
    for (std::uint32_t s = 0; s < kSlots; ++s)
      if (evictor_.recover(s)) read(s);
  }

 private:
  void read(std::uint32_t s) {
    const std::uint32_t owner = control_.slot(s).owner.load();
    for (std::uint64_t& word : payload_->words[s]) word = word_of(owner >> 16, owner & 0xFFFF);
    evictor_.publish(s, random_() % 4 == 0 ? std::uint64_t{1} << random_() % kReaders : 0);
  }

  Control control_;
  Evictor evictor_;
  Payload* payload_;
  std::minstd_rand random_;
};

// What a client does: hold a set, compute, release. Returns how many experts it computed with.
class User {
 public:
  User(Control control, const Payload* payload, std::uint32_t bit, unsigned seed)
      : holder_(control, bit), payload_(payload), random_(seed) {}

  unsigned turn() {
    unsigned n_used = 0;
    std::array<std::int32_t, 2> slots;
    std::array<std::uint64_t, 2> expected;
    for (unsigned i = 0; i < slots.size(); ++i) {
      const std::uint32_t layer = random_() % kLayers, expert = random_() % kExperts;
      slots[i] = holder_.hold(layer, expert);
      expected[i] = word_of(layer, expert);
    }
    for (unsigned i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      for (const std::uint64_t& word : payload_->words[slots[i]])
        if (word != expected[i]) die("wrong bytes in slot " + std::to_string(slots[i]));
      ++n_used;
    }
    for (const std::int32_t s : slots)
      if (s >= 0) holder_.release(static_cast<std::uint32_t>(s));
    if (random_() % 64 == 0) holder_.reconcile();
    return n_used;
  }

  void leave() {
    holder_.reconcile();
    if (holder_.n_held() != 0) die("a user still holds slots");
  }

 private:
  Holder holder_;
  const Payload* payload_;
  std::minstd_rand random_;
};

// Shared memory that goes with its mappings, whatever becomes of the processes.
Mapping unnamed(std::size_t n_bytes) {
  const std::string name = "/spk-stress-" + std::to_string(::getpid());
  Mapping mapping = Mapping::create(name, n_bytes);
  Mapping::unlink(name);
  return mapping;
}

Control format(std::byte* memory) {
  const std::size_t n_bytes = Control::bytes_for(kLayers, kExperts, kSlots);
  return Control::format(memory, n_bytes, kLayers, kExperts, kSlots, "stress", "[]");
}

void expect_unmarked(Control control) {
  for (std::uint32_t s = 0; s < kSlots; ++s)
    if (control.slot(s).mask.load() != 0) die("slot " + std::to_string(s) + " is still marked");
}

void threads(unsigned n_uses) {
  const Mapping memory = unnamed(Control::bytes_for(kLayers, kExperts, kSlots));
  const Control control = format(memory.data());
  const auto payload = std::make_unique<Payload>();
  std::atomic<unsigned> n_busy{kReaders};
  std::vector<std::thread> readers;
  for (unsigned bit = 0; bit < kReaders; ++bit)
    readers.emplace_back([&, bit] {
      User user(control, payload.get(), bit, bit + 1);
      for (unsigned n = 0; n < n_uses; n += user.turn()) std::this_thread::yield();
      user.leave();
      --n_busy;
    });
  Prefetch prefetch(control, payload.get(), 99);
  while (n_busy.load() > 0) prefetch.turn();
  for (std::thread& t : readers) t.join();
  for (std::uint32_t bit = 0; bit < kReaders; ++bit) Evictor(control).clear_client(bit);  // grants after they left
  expect_unmarked(control);
}

void ring(std::uint32_t n_events) {
  const auto ring = std::make_unique<Ring>();
  std::thread producer([&] {
    std::vector<std::uint32_t> experts;
    std::vector<std::int32_t> slots;
    for (std::uint32_t step = 0; step < n_events; ++step) {
      experts.assign(step % 9, step & 0xFFFF);
      slots.assign(step % 9, step % 2 == 0 ? 7 : -1);
      while (!ring_push(*ring, {step, 7, 1, ~step}, step % 100, experts, slots)) std::this_thread::yield();
    }
  });
  for (std::uint32_t step = 0; step < n_events;) {
    for (const Event& e : ring_drain(*ring, ~std::uint64_t{0})) {
      const bool is_right = e.step == step && e.stream == 7 && e.rows == 1 && e.token == ~step &&
                            e.layer == step % 100 && e.experts.size() == step % 9;
      if (!is_right) die("event " + std::to_string(step) + " is lost or out of order");
      for (std::size_t i = 0; i < e.experts.size(); ++i)
        if (e.experts[i] != (step & 0xFFFF) || e.is_hit[i] != (step % 2 == 0)) die("wrong expert in an event");
      ++step;
    }
  }
  producer.join();
}

struct Shared {
  Payload payload;
  std::atomic<bool> is_over, has_failed;
  std::atomic<std::uint64_t> n_used;
};

// Run `turn` over and over in a child, until it is over. No child outlives its parent.
pid_t start(Shared* shared, auto make) {
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) die("fork failed");
  if (pid > 0) return pid;
  auto role = make();
  while (!shared->is_over.load() && ::getppid() == parent) shared->n_used += role.turn();
  role.leave();
  std::_Exit(0);
}

// Wait for a child that was killed, or told that it is over.
void bury(pid_t pid) {
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) die("waitpid failed");
  const bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if (!was_killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) die("a child failed");
}

void processes(unsigned n_kills) {
  const Mapping control_memory = unnamed(Control::bytes_for(kLayers, kExperts, kSlots));
  const Mapping shared_memory = unnamed(round_up(sizeof(Shared), kPage));
  const Control control = format(control_memory.data());
  auto* shared = reinterpret_cast<Shared*>(shared_memory.data());
  failed = &shared->has_failed;
  unsigned seed = 1;
  auto start_user = [&](std::uint32_t bit) {
    return start(shared, [&, bit] { return User(control, &shared->payload, bit, ++seed); });
  };
  auto start_prefetch = [&] {
    return start(shared, [&] {
      Prefetch prefetch(control, &shared->payload, ++seed);
      prefetch.recover();
      return prefetch;
    });
  };

  std::array<pid_t, kReaders + 1> pids;
  for (std::uint32_t bit = 0; bit < kReaders; ++bit) pids[bit] = start_user(bit);
  pids[kReaders] = start_prefetch();
  std::minstd_rand random(5);
  for (unsigned i = 0; i < n_kills && !shared->has_failed.load(); ++i) {
    const std::uint64_t until = shared->n_used.load() + 1 + random() % 2000;
    while (shared->n_used.load() < until && !shared->has_failed.load()) std::this_thread::yield();
    const std::uint32_t who = random() % (kReaders + 1);
    ++seed;
    ::kill(pids[who], SIGKILL);
    bury(pids[who]);
    if (who < kReaders) Evictor(control).clear_client(who);
    pids[who] = who < kReaders ? start_user(who) : start_prefetch();
  }
  shared->is_over = true;
  for (const pid_t pid : pids) bury(pid);
  for (std::uint32_t bit = 0; bit < kReaders; ++bit) Evictor(control).clear_client(bit);  // grants after they left
  expect_unmarked(control);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 3 ? argv[1] : "";
  const auto n = static_cast<unsigned>(std::strtoul(argc == 3 ? argv[2] : "0", nullptr, 10));
  if (what == "threads") {
    threads(n);
  } else if (what == "ring") {
    ring(n);
  } else if (what == "processes") {
    processes(n);
  } else {
    die("usage: slot_stress threads|ring|processes COUNT");
  }
  return 0;
}

// A team of threads: one of them runs a program, and the others stand by, awake, and take their part of each of its
// loops.
//
// A thread that sleeps takes some 20 µs to wake. OpenMP's threads spin between loops, but only briefly where the
// process has more of them than there are processors, and one other thread of the process that has computed in parallel
// is enough for that. A model of a hundred short loops would then spend half of its time waiting.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "division.h"

namespace fastbert {

class Team {
 public:
  explicit Team(int64_t members) : members_(members), seats_(new Seat[members]) {}

  int64_t members() const { return members_; }

  // The team whose program this thread is running; in a loop, a team of this thread alone; otherwise nullptr.
  static Team* current() { return current_; }

  // Calls f(), part of a loop: loops within it are this thread's alone.
  template <class F>
  static void run_part(const F& f) {
    const Current current(&alone());
    f();
  }

  // For member 0: calls f(), whose loops are shared with the members that stand by, now or later.
  template <class F>
  void run(const F& f) {
    const Current current(this);
    const End end{*this};
    f();
  }

  // For the other members: takes parts of loops, and returns when the program has ended.
  void stand_by(int64_t member) {
    Seat& seat = seats_[member];
    for (Patience patience;;) {
      int state = seat.state.load(std::memory_order_acquire);
      if (state == kEnded) return;
      if (state == kOpen && seat.state.compare_exchange_strong(state, kTaken, std::memory_order_acquire)) {
        take(member);
        patience = {};
      }
      patience.wait();
    }
  }

  // Calls f(begin, end) on ranges of 0 to n, of at least `grain`, at most one for each member. A member that arrives
  // late can take its part until this thread takes it instead. An exception is rethrown when all parts are done.
  template <class F>
  void share(int64_t n, int64_t grain, const F& f) {
    if (members_ == 1) return n > 0 ? f(int64_t(0), n) : void();
    const int64_t least = std::max<int64_t>(1, grain);
    const int64_t parts = std::clamp<int64_t>(divide_up(n, least), 1, members_);
    loop_ = {n, divide_up(n, parts), &f,
             [](const void* f, int64_t begin, int64_t end) { (*static_cast<const F*>(f))(begin, end); }};
    for (int64_t i = 1; i < parts; ++i) seats_[i].state.store(kOpen, std::memory_order_release);
    take(0);
    for (int64_t i = 1; i < parts; ++i) finish(i);
    for (int64_t i = 0; i < parts; ++i)
      if (seats_[i].error) std::rethrow_exception(seats_[i].error);
  }

 private:
  enum : int { kIdle, kOpen, kTaken, kEnded };  // of a seat; kOpen: it has a part of a loop, which is not taken yet

  struct alignas(128) Seat {  // two cache lines, because processors fetch them in pairs
    std::atomic<int> state{kIdle};
    std::exception_ptr error;  // from the last loop in which it had a part
  };
  struct Loop {
    int64_t n, part;
    const void* f;
    void (*call)(const void* f, int64_t begin, int64_t end);
  };
  struct Current {
    explicit Current(Team* team) : before(std::exchange(current_, team)) {}
    ~Current() { current_ = before; }
    Team* const before;
  };
  struct End {
    Team& team;
    ~End() {
      for (int64_t i = 0; i < team.members_; ++i) team.seats_[i].state.store(kEnded, std::memory_order_release);
    }
  };

  static Team& alone() {
    static Team team(1);
    return team;
  }

  // Spins, and after a while yields the processor to other threads.
  class Patience {
   public:
    void wait() {
      if (waited_ == kAwake) return std::this_thread::yield();
      ++waited_;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }

   private:
    static constexpr int kAwake = 2000;  // some 50 µs
    int waited_ = 0;
  };

  void take(int64_t part) {
    Seat& seat = seats_[part];
    const int64_t begin = part * loop_.part, end = std::min(loop_.n, begin + loop_.part);
    seat.error = nullptr;
    try {
      if (begin < end) run_part([&] { loop_.call(loop_.f, begin, end); });
    } catch (...) {
      seat.error = std::current_exception();
    }
    seat.state.store(kIdle, std::memory_order_release);
  }

  void finish(int64_t part) {
    std::atomic<int>& state = seats_[part].state;
    int open = kOpen;
    if (state.compare_exchange_strong(open, kTaken, std::memory_order_acquire)) return take(part);
    for (Patience patience; state.load(std::memory_order_acquire) != kIdle;) patience.wait();
  }

  inline static thread_local Team* current_ = nullptr;

  const int64_t members_;
  const std::unique_ptr<Seat[]> seats_;
  Loop loop_{};
};

}  // namespace fastbert

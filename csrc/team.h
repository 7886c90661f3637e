// Threads that stand by while one of them runs a program, and take their part of its loops without being woken for
// each.
//
// A thread that sleeps takes some 20 µs to wake. OpenMP's wait awake between loops, but not for long where the process
// has more of them than there are processors: it is enough that another thread of the program has computed in parallel.
// Then a model of a hundred short loops would wait half of its time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace fastbert {

class Team {
 public:
  explicit Team(int64_t members) : members_(members), seats_(new Seat[members]) {}

  int64_t members() const { return members_; }

  // The team whose program this thread runs, outside of its loops; or nullptr.
  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  // Calls f(), whose loops are shared with whoever stands by, now or later. Member 0 does this.
  template <class F>
  void run(const F& f) {
    const Current current(this);
    const End end{*this};
    f();
  }

  // What the other members do: returns when the program has ended.
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

  // Calls f(begin, end) on ranges of 0 to n, of at least `grain`, one for each member; the part of one who is not there
  // yet is open to him until this thread takes it. An exception is thrown on, when all are done.
  template <class F>
  void share(int64_t n, int64_t grain, const F& f) {
    const int64_t least = std::max<int64_t>(1, grain);
    const int64_t parts = std::clamp<int64_t>((n + least - 1) / least, 1, members_);
    loop_ = {n, (n + parts - 1) / parts, &f,
             [](const void* f, int64_t begin, int64_t end) { (*static_cast<const F*>(f))(begin, end); }};
    for (int64_t i = 1; i < parts; ++i) seats_[i].state.store(kOpen, std::memory_order_release);
    const Current none(nullptr);
    take(0);
    for (int64_t i = 1; i < parts; ++i) finish(i);
    for (int64_t i = 0; i < parts; ++i)
      if (seats_[i].error) std::rethrow_exception(seats_[i].error);
  }

 private:
  enum : int { kIdle, kOpen, kTaken, kEnded };  // what a seat is: its part of a loop is open when there is one

  struct alignas(128) Seat {  // two lines of the cache, which processors fetch together
    std::atomic<int> state{kIdle};
    std::exception_ptr error;  // of its part of the last loop that it had one of
  };
  struct Loop {
    int64_t n, part;
    const void* f;
    void (*call)(const void* f, int64_t begin, int64_t end);
  };
  struct Current {
    explicit Current(Team* team) : before(std::exchange(current(), team)) {}
    ~Current() { current() = before; }
    Team* const before;
  };
  struct End {
    Team& team;
    ~End() {
      for (int64_t i = 0; i < team.members_; ++i) team.seats_[i].state.store(kEnded, std::memory_order_release);
    }
  };

  // Waits awake, and after a while lets others run.
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
      if (begin < end) loop_.call(loop_.f, begin, end);
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

  const int64_t members_;
  const std::unique_ptr<Seat[]> seats_;
  Loop loop_{};
};

}  // namespace fastbert

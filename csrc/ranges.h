// The ranges of a loop, which threads take one after another.
//
// Threads are rarely equally fast: processors have cores of two kinds, and share them with other processes and other
// virtual machines. If each thread had an equal share, all would wait for the slowest. So ranges are large at first and
// then smaller, and a thread that is ahead takes more of them. Each size comes once per thread: threads that are
// equally fast get equal shares.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

namespace fastbert {

struct Range {
  int64_t begin, end;
  int64_t next;  // where the thread's next range begins if all threads are equally fast; the end of all if none is left
};

class Ranges {
 public:
  // 0 to n in ranges of `least` (at least 1) to `most`, for at most `threads` threads. Ranges are smaller than `least`
  // only where equal shares would be, too, and fewer threads share what is less than `least` for each of them.
  Ranges(int64_t n, int64_t threads, int64_t least, int64_t most = std::numeric_limits<int64_t>::max())
      : threads_(std::clamp<int64_t>(n / least, 1, threads)) {
    for (int64_t left = n; left > 0;) {
      const int64_t share = ratio(left, threads_), half = std::clamp(ratio(share, 2), least, most);
      const bool last = threads_ == 1 || share - half < least;
      const int64_t size = last ? ratio(share, ratio(share, most)) : half;
      for (int64_t i = 0; i < threads_ && left > 0; ++i) {
        left -= std::min(size, left);
        ends_.push_back(n - left);
      }
    }
  }

  int64_t threads() const { return threads_; }

  // Calls f(range) on ranges that no other thread has taken, until none is left.
  template <class F>
  void take(const F& f) {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < ends_.size();)
      f(Range{i ? ends_[i - 1] : 0, ends_[i], ends_[std::min(i + size_t(threads_), ends_.size()) - 1]});
  }

 private:
  static int64_t ratio(int64_t a, int64_t b) { return a / b + (a % b > 0); }  // rounded up

  int64_t threads_;
  std::vector<int64_t> ends_;
  std::atomic<size_t> next_{0};
};

}  // namespace fastbert

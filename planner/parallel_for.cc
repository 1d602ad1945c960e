// Whoever calls works too, and never waits for a thread that has not begun: an idle thread joins a
// loop while there is something left of it, or lets it be. Who waits for the last pieces of a loop
// joins others meanwhile, those within these pieces among them.
#include "planner/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace trainrt {

namespace {

struct Loop {
  size_t count = 0;
  const std::function<void(size_t i, size_t worker)>* fn = nullptr;
  std::atomic<size_t> next = 0;  // piece
  size_t helpers = 0;            // that have joined
  size_t active = 0;             // of them
  size_t failed = 0;             // the lowest piece that threw
  std::exception_ptr error;
};

class Pool {
 public:
  static Pool& instance() {
    static Pool pool;
    return pool;
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
  }

  size_t most() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }
  void set_most(size_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_ = most;
  }

  void run(Loop* loop) {
    std::unique_lock<std::mutex> lock(mutex_);
    start_threads();
    loops_.push_front(loop);
    changed_.notify_all();
    lock.unlock();
    work(loop, 0);
    lock.lock();
    loops_.remove(loop);
    help_until(&lock, [loop] { return loop->active == 0; });
  }

 private:
  // They outlive the loop, in processes that go on to train: signals are not for them.
  void start_threads() {
    if (threads_.size() + 1 >= most_) {
      return;
    }
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads_.size() + 1 < most_) {
      threads_.emplace_back([this] {
        std::unique_lock<std::mutex> lock(mutex_);
        help_until(&lock, [this] { return ends_; });
      });
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Pieces of `loop` until none is left.
  void work(Loop* loop, size_t worker) {
    for (size_t i = loop->next++; i < loop->count; i = loop->next++) {
      try {
        (*loop->fn)(i, worker);
      } catch (...) {
        loop->next = loop->count;  // those below i are under way
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!loop->error || i < loop->failed) {
          loop->failed = i;
          loop->error = std::current_exception();
        }
      }
    }
  }

  template <typename Done>
  void help_until(std::unique_lock<std::mutex>* lock, const Done& done) {
    while (!done()) {
      const auto open = std::find_if(loops_.begin(), loops_.end(), [this](const Loop* loop) {
        return loop->next < loop->count && loop->helpers + 1 < most_;
      });
      if (open == loops_.end()) {
        changed_.wait(*lock);
        continue;
      }
      Loop* loop = *open;
      const size_t worker = ++loop->helpers;
      ++loop->active;
      lock->unlock();
      work(loop, worker);
      lock->lock();
      --loop->active;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t most_ = std::max(1U, std::thread::hardware_concurrency());
  std::list<Loop*> loops_;  // with pieces that nobody has taken yet, the innermost first
  bool ends_ = false;
  std::vector<std::jthread> threads_;  // the last member: they end before what they use
};

}  // namespace

void parallel_for(size_t count, const std::function<void(size_t i, size_t worker)>& fn) {
  if (count == 1 || Pool::instance().most() == 1) {
    for (size_t i = 0; i < count; ++i) {
      fn(i, 0);
    }
    return;
  }
  Loop loop;
  loop.count = count;
  loop.fn = &fn;
  Pool::instance().run(&loop);
  if (loop.error) {
    std::rethrow_exception(loop.error);
  }
}

size_t most_workers() {
  return Pool::instance().most();
}

WorkerLimit::WorkerLimit(size_t most) : before_(most_workers()) {
  Pool::instance().set_most(most);
}

WorkerLimit::~WorkerLimit() {
  Pool::instance().set_most(before_);
}

}  // namespace trainrt

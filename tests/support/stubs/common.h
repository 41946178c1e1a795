// Owns what the stub drivers share: host memory that counts as a device's, streams with worker threads,
// events, and knobs. Everything here is leaked on purpose, as the workers outlive main().
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace stub {
using Clock = std::chrono::steady_clock;
inline int64_t env(const char* n, int64_t d) {
  auto* s = getenv(n);
  return s ? atoll(s) : d;
}
inline auto& mx = *new std::mutex();
inline auto& cv = *new std::condition_variable();

struct Knobs {
  int64_t devices = env("STUB_DEVICES", 2);
  int64_t memory = env("STUB_MEMORY", int64_t(16) << 30);  // a device's
  int64_t other = 0;                                       // of it, held by other processes
  int64_t copy_us = 0;                                     // how long an asynchronous copy takes
  int64_t fail = 0;                                        // the error of all calls that wait for the device or use it
  int64_t refuse_lock = 0;                                 // the error of whoever locks memory that is already there
};
inline auto& knobs = *new Knobs();

struct Queue {  // a stream: work in order, on a thread that starts with the first task
  std::deque<std::function<void()>> tasks;
  int64_t queued = 0, done = 0;
  int dev = 0;
  bool started = false;
  void push(std::function<void()> f) {
    std::lock_guard<std::mutex> g(mx);
    tasks.push_back(std::move(f));
    queued++;
    if (!started) {
      started = true;
      std::thread([this] { run(); }).detach();
    }
    cv.notify_all();
  }
  void run() {
    std::unique_lock<std::mutex> g(mx);
    for (;;) {
      cv.wait(g, [&] { return !tasks.empty(); });
      auto f = std::move(tasks.front());
      tasks.pop_front();
      g.unlock();
      f();
      g.lock();
      done++;
      cv.notify_all();
    }
  }
  void wait() {
    std::unique_lock<std::mutex> g(mx);
    auto t = queued;
    cv.wait(g, [&] { return done >= t; });
  }
  bool idle() {
    std::lock_guard<std::mutex> g(mx);
    return done >= queued;
  }
};
inline auto& streams = *new std::map<Queue*, bool>();
inline Queue* new_stream(int dev) {
  auto* q = new Queue();
  q->dev = dev;
  std::lock_guard<std::mutex> g(mx);
  streams[q] = true;
  return q;
}
inline Queue& null_stream(int dev) {
  static auto* all = [] {
    auto* a = new std::map<int, Queue*>();
    for (int d = 0; d < 16; d++) (*a)[d] = new_stream(d);
    return a;
  }();
  return *all->at(dev);
}
inline void synchronize(int dev) {
  std::unique_lock<std::mutex> g(mx);
  cv.wait(g, [&] {
    for (auto& [q, alive] : streams)
      if (q->dev == dev && q->done < q->queued) return false;
    return true;
  });
}

struct Mark {
  bool done = false;
  Clock::time_point at;
};
struct Event {
  bool timed = true;
  std::shared_ptr<Mark> mark;
};  // a new Mark for each record
inline void record(Event& e, Queue& q) {
  auto m = e.mark = std::make_shared<Mark>();
  q.push([m] {
    std::lock_guard<std::mutex> g(mx);
    m->at = Clock::now();
    m->done = true;
    cv.notify_all();
  });
}
inline void wait(std::shared_ptr<Mark> m) {
  if (!m) return;
  std::unique_lock<std::mutex> g(mx);
  cv.wait(g, [&] { return m->done; });
}
inline bool happened(Event& e) {
  std::lock_guard<std::mutex> g(mx);
  return !e.mark || e.mark->done;
}
inline float between(Event& a, Event& b) {
  return std::chrono::duration<float, std::milli>(b.mark->at - a.mark->at).count();
}

struct Area {
  size_t size;
  int dev;
};  // dev -1: pinned host memory, -2: memory of others that was locked
inline auto& areas = *new std::map<const char*, Area>();
inline int64_t used[16];
inline Area* find(const void* p) {  // under mx
  auto it = areas.upper_bound(static_cast<const char*>(p));
  if (it == areas.begin()) return nullptr;
  --it;
  return static_cast<const char*>(p) < it->first + it->second.size ? &it->second : nullptr;
}
inline bool take(void** p, size_t n, int d) {
  std::lock_guard<std::mutex> g(mx);
  if (d >= 0 && used[d] + knobs.other + int64_t(n) > knobs.memory) return false;
  if (posix_memalign(p, 4096, n ? n : 1)) return false;
  if (d >= 0) used[d] += n;
  areas[static_cast<char*>(*p)] = {n, d};
  return true;
}
inline void lock(void* p, size_t n) {
  std::lock_guard<std::mutex> g(mx);
  areas[static_cast<char*>(p)] = {n, -2};
}
inline bool unlock(void* p) {
  std::lock_guard<std::mutex> g(mx);
  auto it = areas.find(static_cast<char*>(p));
  if (it == areas.end() || it->second.dev != -2) return false;
  areas.erase(it);
  return true;
}
inline bool give(void* p) {
  std::lock_guard<std::mutex> g(mx);
  auto it = areas.find(static_cast<char*>(p));
  if (it == areas.end() || it->second.dev == -2) return false;
  if (it->second.dev >= 0) used[it->second.dev] -= it->second.size;
  areas.erase(it);
  free(p);
  return true;
}
inline size_t unused(int d) {
  std::lock_guard<std::mutex> g(mx);
  return std::max<int64_t>(0, knobs.memory - knobs.other - used[d]);
}
inline void copy(void* d, const void* s, size_t n, Queue& q) {
  bool known;
  {
    std::lock_guard<std::mutex> g(mx);
    known = find(d) && find(s);
  }
  if (!known) {  // pageable host memory: done before the call returns
    q.wait();
    memcpy(d, s, n);
  } else {
    q.push([=, us = knobs.copy_us] {
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      memcpy(d, s, n);
    });
  }
}
}  // namespace stub

// For tests, through ctypes: whether there is such a knob.
extern "C" __attribute__((visibility("default"))) int stub_set(const char* knob, int64_t value) {
  std::lock_guard<std::mutex> g(stub::mx);
  auto& k = stub::knobs;
  const std::map<std::string, int64_t*> known = {
      {"memory", &k.memory}, {"other", &k.other}, {"copy_us", &k.copy_us}, {"fail", &k.fail},
      {"refuse_lock", &k.refuse_lock}};
  auto it = known.find(knob);
  if (it == known.end()) return 0;
  *it->second = value;
  return 1;
}

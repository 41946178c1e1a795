// A simulated accelerator for PyTorch's PrivateUse1 device type, in host memory.
//
// Owns the device: its memory, streams, operators and faults. Must not know which vendor it stands for, but by name.
//
// Real here:  a distinct device type, a stream-aware caching allocator with capacity and
//             statistics, streams with worker threads, events, pinned host memory, truly
//             asynchronous pinned copies, device checks, torch.accelerator support.
// Simulated:  kernels. Each one waits for its own stream, then runs on the CPU and returns.
// Injectable: capacity, leaks, kernel faults (out of memory, device error), missing kernels,
//             copy delay.
// No Python in here: it is loaded with torch.ops.load_library and driven through torch.ops.simdev.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kStreams = 32; // of a device, given out in turn, as PyTorch's own devices do: each is a thread that stays
using Clock = std::chrono::steady_clock;

// ---------------------------------------------------------------- knobs and counters
std::mutex knobs_mx;
std::string vendor = "SIM";
int device_count = 1;
int64_t copy_delay_us = 0;
int64_t fault_after = -1; // kernels still to run before the fault; -1: none planned
bool fault_oom = false, fault_sticky = false, fault_active = false;
std::string fault_message;
std::set<std::string> denied_ops;
std::map<std::string, int64_t> counters;
bool initialized = false, bad_fork = false;

void count(const std::string& what, int64_t n = 1) {
  std::lock_guard<std::mutex> g(knobs_mx);
  counters[what] += n;
}
void touch() { // the first use of a device starts its runtime, which a forked child cannot use
  TORCH_CHECK(!bad_fork, "Cannot re-initialize ", vendor, " in forked subprocess. To use ", vendor,
              " with multiprocessing, you must use the 'spawn' start method");
  static bool once = (pthread_atfork(nullptr, nullptr, [] { bad_fork = initialized; }), true);
  initialized = once;
}
thread_local DeviceIndex current = 0;
DeviceIndex check(int64_t i) {
  TORCH_CHECK(i >= 0 && i < device_count, vendor, " error: invalid device ordinal ", i, " (", device_count, " devices)");
  return static_cast<DeviceIndex>(i);
}

// ---------------------------------------------------------------- streams and events
// One lock for all streams: this is a test device, not a fast one.
auto& stream_mx = *new std::mutex(); // never destroyed: the workers outlive main()
auto& stream_cv = *new std::condition_variable();
struct Queue { // work in order, on a thread that starts with the first asynchronous task
  std::deque<std::function<void()>> tasks;
  int64_t queued = 0, done = 0;
  bool started = false;
  void push(std::function<void()> f) {
    std::lock_guard<std::mutex> g(stream_mx);
    tasks.push_back(std::move(f));
    queued++;
    if (!started) {
      started = true;
      std::thread([this] { run(); }).detach();
    }
    stream_cv.notify_all();
  }
  void run() {
    std::unique_lock<std::mutex> g(stream_mx);
    for (;;) {
      stream_cv.wait(g, [&] { return !tasks.empty(); });
      auto f = std::move(tasks.front());
      tasks.pop_front();
      g.unlock();
      f();
      f = nullptr;
      g.lock();
      done++;
      stream_cv.notify_all();
    }
  }
  int64_t ticket() { std::lock_guard<std::mutex> g(stream_mx); return queued; }
  bool reached(int64_t t) { std::lock_guard<std::mutex> g(stream_mx); return done >= t; }
  void wait() {
    std::unique_lock<std::mutex> g(stream_mx);
    auto t = queued;
    stream_cv.wait(g, [&] { return done >= t; });
  }
};
std::map<StreamId, Queue*>& queues(DeviceIndex d) { // leaked on purpose: threads outlive main()
  static auto* all = new std::array<std::map<StreamId, Queue*>, kMaxDevices>();
  return (*all)[d];
}
Queue& queue(DeviceIndex d, StreamId id) {
  std::lock_guard<std::mutex> g(stream_mx);
  auto*& q = queues(d)[id];
  if (!q) q = new Queue();
  return *q;
}
Queue& queue(const Stream& s) { return queue(s.device_index(), s.id()); }
thread_local std::array<StreamId, kMaxDevices> current_stream{};
Queue& here(DeviceIndex d) { return queue(d, current_stream[d]); }
void synchronize(DeviceIndex d) {
  count("synchronize");
  std::vector<Queue*> qs;
  {
    std::lock_guard<std::mutex> g(stream_mx);
    for (auto& [id, q] : queues(d)) qs.push_back(q);
  }
  for (auto* q : qs) q->wait();
}
struct Mark { bool timed, done = false; Clock::time_point at; };
using Event = std::shared_ptr<Mark>; // one Mark per record(), as waiters keep the version they saw

// ---------------------------------------------------------------- memory
struct Block {
  void* ptr;
  size_t size;
  DeviceIndex dev;
  StreamId stream; // the stream it was allocated on; only that stream may reuse it
  std::map<Queue*, int64_t> uses; // other streams' work that must end before reuse
};
struct Pool { // a device's memory, or (device -1) pinned host memory
  std::map<void*, Block> live;
  std::map<std::pair<StreamId, size_t>, std::vector<Block>> cached;
  std::vector<Block> waiting; // freed, but still used by another stream
  int64_t capacity = int64_t(16) << 30;
  int64_t leaked = 0, lost = 0, other = 0; // lost: not even empty_cache gives it back
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t reserved() { return stats.reserved_bytes[0].current; }
};
auto& pool_mx = *new std::recursive_mutex();
Pool& pool(int d) {
  static auto* all = new std::array<Pool, kMaxDevices + 1>();
  return (*all)[d + 1];
}
void settle(Pool& p) { // blocks whose other streams have caught up become reusable
  auto w = std::move(p.waiting);
  p.waiting.clear();
  for (auto& b : w) {
    bool ready = true;
    for (auto& [q, t] : b.uses) ready = ready && q->reached(t);
    if (!ready) { p.waiting.push_back(std::move(b)); continue; }
    b.uses.clear();
    p.cached[{b.stream, b.size}].push_back(std::move(b));
  }
}
void release_cached(int d) { // under the lock: what is freed from now on stays cached
  if (d >= 0) synchronize(static_cast<DeviceIndex>(d)); // so that no queued work, another thread's neither, touches what goes back
  auto& p = pool(d);
  settle(p);
  for (auto& [key, blocks] : p.cached)
    for (auto& b : blocks) {
      std::free(b.ptr);
      p.stats.reserved_bytes[0].decrease(b.size);
      p.stats.num_device_free++;
    }
  p.cached.clear();
}
std::string gib(int64_t n) {
  char s[64];
  snprintf(s, sizeof s, n < (1 << 30) ? "%.2f MiB" : "%.2f GiB", n / (n < (1 << 30) ? 1048576.0 : 1073741824.0));
  return s;
}
[[noreturn]] void out_of_memory(int d, int64_t size) {
  auto& p = pool(d);
  p.stats.num_ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, false, vendor, " out of memory. Tried to allocate ", gib(size), " (", vendor, " ", d, "; ",
                   gib(p.capacity), " total capacity; ", gib(p.stats.allocated_bytes[0].current), " already allocated; ",
                   gib(std::max<int64_t>(0, p.capacity - p.other - p.reserved())), " free; ", gib(p.reserved()),
                   " reserved in total by PyTorch)");
}
void* allocate(int d, StreamId stream, size_t n) {
  if (!n) return nullptr;
  std::lock_guard<std::recursive_mutex> g(pool_mx);
  auto& p = pool(d);
  size_t size = (n + 511) / 512 * 512;
  settle(p);
  auto hit = p.cached.lower_bound({stream, size});
  Block b;
  if (hit != p.cached.end() && hit->first.first == stream && hit->first.second <= 2 * size + (1 << 20)) {
    b = std::move(hit->second.back());
    hit->second.pop_back();
    if (hit->second.empty()) p.cached.erase(hit);
  } else {
    auto fits = [&] { return d < 0 || p.reserved() + p.other + int64_t(size) <= p.capacity; };
    if (!fits()) { // like the real allocators: give cached blocks back and try once more
      p.stats.num_alloc_retries++;
      release_cached(d);
    }
    if (!fits()) out_of_memory(d, size);
    void* ptr = nullptr;
    TORCH_CHECK(posix_memalign(&ptr, 512, size) == 0, "simulated device: the host itself is out of memory");
    b = Block{ptr, size, static_cast<DeviceIndex>(d), stream, {}};
    p.stats.reserved_bytes[0].increase(size);
    p.stats.num_device_alloc++;
  }
  p.stats.allocated_bytes[0].increase(b.size);
  p.stats.allocation[0].increase(1);
  auto* ptr = b.ptr;
  p.live[ptr] = std::move(b);
  return ptr;
}
void release(int d, void* ptr) {
  if (!ptr) return;
  std::lock_guard<std::recursive_mutex> g(pool_mx);
  auto& p = pool(d);
  auto it = p.live.find(ptr);
  if (it == p.live.end()) return;
  p.stats.allocated_bytes[0].decrease(it->second.size);
  p.stats.allocation[0].decrease(1);
  p.waiting.push_back(std::move(it->second));
  p.live.erase(it);
  settle(p);
}
void used_by(int d, void* ptr, Queue& q) { // the block that holds ptr is used by q's queued work
  std::lock_guard<std::recursive_mutex> g(pool_mx);
  auto& live = pool(d).live;
  auto it = live.upper_bound(ptr);
  if (it == live.begin()) return;
  --it;
  if (static_cast<char*>(ptr) < static_cast<char*>(it->first) + it->second.size) it->second.uses[&q] = q.ticket();
}
bool is_pinned(const void* ptr) {
  std::lock_guard<std::recursive_mutex> g(pool_mx);
  auto& live = pool(-1).live;
  auto it = live.upper_bound(const_cast<void*>(ptr));
  if (it == live.begin()) return false;
  --it;
  return static_cast<const char*>(ptr) < static_cast<char*>(it->first) + it->second.size;
}
template <int D> void deleter(void* p) { release(D, p); }
template <int... I> c10::DeleterFnPtr pick(int d, std::integer_sequence<int, I...>) {
  static constexpr c10::DeleterFnPtr t[] = {deleter<I>...};
  return t[d];
}
c10::DeleterFnPtr deleter_of(int d) { return pick(d, std::make_integer_sequence<int, kMaxDevices>()); }
void empty_cache(int d) {
  std::lock_guard<std::recursive_mutex> g(pool_mx);
  release_cached(d);
  auto& p = pool(d);
  p.stats.reserved_bytes[0].decrease(p.leaked);
  p.leaked = 0;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    touch();
    auto d = current;
    auto* ptr = sim::allocate(d, current_stream[d], n);
    return {ptr, ptr, deleter_of(d), Device(kDev, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t n) const override { here(current).wait(); default_copy_data(dst, src, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { for (int d = 0; d < device_count; d++) empty_cache(d); }
  void recordStream(const c10::DataPtr& p, Stream s) override { used_by(p.device().index(), p.get(), queue(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    return pool(check(d)).stats;
  }
  void resetAccumulatedStats(DeviceIndex d) override { resetPeakStats(d); }
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    auto& s = pool(check(d)).stats;
    s.allocated_bytes[0].reset_peak();
    s.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    auto& p = pool(check(d));
    return {std::max<int64_t>(0, p.capacity - p.other - p.reserved()), p.capacity};
  }
};
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    touch();
    auto* ptr = sim::allocate(-1, 0, n);
    return {ptr, ptr, &deleter<-1>, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleter<-1>; }
  void copy_data(void* dst, const void* src, size_t n) const override { default_copy_data(dst, src, n); }
  bool record_event(void* ptr, void*, Stream s) override { used_by(-1, ptr, queue(s)); return true; }
  void empty_cache() override { std::lock_guard<std::recursive_mutex> g(pool_mx); release_cached(-1); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
Allocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_allocator);

// ---------------------------------------------------------------- device guard and hooks
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex of(Device d) { return d.has_index() ? check(d.index()) : current; }
  c10::DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); current = of(d); return old; }
  Device getDevice() const override { return {kDev, current}; }
  void setDevice(Device d) const override { current = of(d); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return bad_fork ? 0 : device_count; }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kDev, of(d)), current_stream[of(d)]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(kDev, of(d))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<StreamId> next{0};
    touch();
    return Stream(Stream::UNSAFE, Device(kDev, of(d)), 1 + next++ % kStreams);
  }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue(s); }
  bool queryStream(const Stream& s) const override { auto& q = queue(s); return q.reached(q.ticket()); }
  void synchronizeStream(const Stream& s) const override { count("synchronize"); queue(s).wait(); }
  void synchronizeDevice(DeviceIndex d) const override { synchronize(check(d < 0 ? current : d)); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { device_allocator.recordStream(p, s); }
  // events
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const Stream& s, DeviceIndex, c10::EventFlag flag) const override {
    if (!*e) *e = new Event();
    auto m = std::make_shared<Mark>(Mark{flag == c10::EventFlag::BACKEND_DEFAULT});
    *static_cast<Event*>(*e) = m;
    queue(s).push([m] {
      std::lock_guard<std::mutex> g(stream_mx);
      m->at = Clock::now();
      m->done = true;
      stream_cv.notify_all();
    });
  }
  static void wait(const Event& m) {
    std::unique_lock<std::mutex> g(stream_mx);
    stream_cv.wait(g, [&] { return m->done; });
  }
  void block(void* e, const Stream& s) const override { if (e) queue(s).push([m = *static_cast<Event*>(e)] { wait(m); }); }
  bool queryEvent(void* e) const override {
    std::lock_guard<std::mutex> g(stream_mx);
    return !e || (*static_cast<Event*>(e))->done;
  }
  void synchronizeEvent(void* e) const override { count("synchronize"); if (e) wait(*static_cast<Event*>(e)); }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    auto &x = **static_cast<Event*>(a), &y = **static_cast<Event*>(b);
    TORCH_CHECK(x.timed && y.timed, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(queryEvent(a) && queryEvent(b), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(y.at - x.at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl { // random numbers of the CPU
  explicit Generator(DeviceIndex d) { device_ = Device(kDev, d); key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
};
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !bad_fork && device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return initialized; }
  void init() const override { touch(); }
  DeviceIndex deviceCount() const override { return bad_fork ? 0 : device_count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = check(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = current; if (d >= 0) current = check(d); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current : check(d)); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    static auto* all = new std::array<at::Generator, kMaxDevices>();
    auto& one = (*all)[d < 0 ? current : check(d)];
    if (!one.defined()) one = getNewGenerator(d);
    return one;
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard g(s.device());
    auto fresh = device_allocator.allocate(n);
    if (auto m = std::min(n, s.nbytes())) device_allocator.copy_data(fresh.get(), s.data(), m);
    const_cast<c10::Storage&>(s).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(s).set_nbytes(n);
  }
};
bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// ---------------------------------------------------------------- operators
at::Tensor alias(const at::Tensor& t) { // the same memory seen as a CPU tensor, not owned
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).pinned_memory(false));
}
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  bool to_dev = src.is_cpu(), to_cpu = dst.is_cpu();
  auto d = to_dev ? dst.device().index() : src.device().index();
  auto& q = here(d);
  bool async = non_blocking && (!to_dev || is_pinned(src.data_ptr())) && (!to_cpu || is_pinned(dst.data_ptr()));
  count(to_dev ? "h2d" : to_cpu ? "d2h" : "d2d");
  if (!to_dev && !to_cpu && src.device() != dst.device()) { // peer copy: both ends wait
    queue(dst.device().index(), current_stream[dst.device().index()]).wait();
    async = false;
  }
  auto s = alias(src), t = alias(dst);
  if (!async) {
    q.wait();
    t.copy_(s);
    return dst;
  }
  count("async_copy");
  q.push([s, t, us = copy_delay_us]() mutable {
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    at::AutoDispatchBelowADInplaceOrView below;
    t.copy_(s);
  });
  // A pinned block stays until the copies that use it are over, as in the real host allocators.
  // Device blocks get no such protection: that is what record_stream is for.
  if (to_dev) used_by(-1, src.data_ptr(), q);
  if (to_cpu) used_by(-1, dst.data_ptr(), q);
  return dst;
}
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> dev,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dev.value_or(Device(kDev)));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> dev, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dev.value_or(Device(kDev)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  at::native::resize_(dst, src.sizes());
  return copy_from(src, dst, false);
}
at::Scalar local_scalar_dense(const at::Tensor& t) { // .item(): waits for this stream
  here(t.device().index()).wait();
  return at::native::_local_scalar_dense_cpu(alias(t));
}
void record_stream(at::Tensor& t, Stream s) { device_allocator.recordStream(t.storage().data_ptr(), s); }

// What every kernel launch goes through.
void launch(const std::string& name, DeviceIndex d) {
  touch();
  {
    std::lock_guard<std::mutex> g(knobs_mx);
    counters["kernels"]++;
    counters[name]++;
    // PyTorch asks a vendor for this one under a name of its own, and has words of its own where it is missing.
    TORCH_CHECK_NOT_IMPLEMENTED(name != "aten::convolution" || !denied_ops.count(name), "convolution_overrideable not implemented. You are likely "
                                "triggering this with tensor backend other than CPU/CUDA/MKLDNN, if this is intended, please use TORCH_LIBRARY_IMPL to override this function ");
    TORCH_CHECK_NOT_IMPLEMENTED(!denied_ops.count(name), "Could not run '", name, "' with arguments from the '", vendor, "' backend.");
    if (fault_after >= 0 && fault_after-- == 0) fault_active = true;
    if (fault_active) {
      if (!fault_sticky) fault_active = false;
      if (fault_oom) out_of_memory(d, int64_t(1) << 30);
      TORCH_CHECK(false, fault_message);
    }
  }
  here(d).wait();
}
template <class F> void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (at::Tensor t : v.toTensorList()) f(t);
  else if (v.isList()) for (const c10::IValue& e : v.toListRef()) each_tensor(e, f);
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  std::optional<Device> dev;
  auto args = torch::jit::last(*stack, schema.arguments().size());
  for (const auto& a : args) {
    each_tensor(a, [&](const at::Tensor& t) { if (t.defined() && t.device().type() == kDev && !dev) dev = t.device(); });
    if (a.isDevice() && a.toDevice().type() == kDev && !dev) dev = a.toDevice();
  }
  // Kernels refuse mixed devices, but take 0-dim CPU tensors as scalars, and CPU indices.
  if (name.find("index") == std::string::npos)
    for (const auto& a : args)
      each_tensor(a, [&](const at::Tensor& t) {
        TORCH_CHECK(!t.defined() || !dev || t.device() == *dev || (t.is_cpu() && t.dim() == 0),
                    "Expected all tensors to be on the same device, but found at least two devices, ", *dev, " and ", t.device(), "! (in ", name, ")");
      });
  c10::OptionalDeviceGuard g(dev);
  launch(name, dev && dev->has_index() ? dev->index() : current);
  at::native::cpu_fallback(op, stack);
}
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(x.device() == w.device() && (!b || !b->defined() || b->device() == x.device()),
              "Expected all tensors to be on the same device, but found at least two devices, ", x.device(), " and ", w.device(), "! (in aten::convolution)");
  c10::DeviceGuard g(x.device());
  launch("aten::convolution", x.device().index());
  auto out = at::convolution(alias(x), alias(w), b && b->defined() ? std::optional<at::Tensor>(alias(*b)) : std::nullopt, stride, padding, dilation,
                             transposed, output_padding, groups);
  auto dst = empty_strided(out.sizes(), out.strides(), out.scalar_type(), {}, x.device(), {});
  alias(dst).copy_(out);
  return dst;
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0; // SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> off) { return at::native::as_strided_tensorimpl(t, size, stride, off); });
  m.impl("view", [](const at::Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); });
  m.impl("_reshape_alias", [](const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) { return at::native::_reshape_alias(t, size, stride); });
  m.impl("unfold", [](const at::Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); });
  m.impl("resize_", [](const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> f) -> const at::Tensor& { return at::native::resize_(t, size, f); });
  m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage s) -> at::Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& t, at::Storage s, int64_t off, at::IntArrayRef size, at::IntArrayRef stride) -> at::Tensor& { return at::native::set_storage_cpu_(t, s, off, size, stride); });
  m.impl("set_.source_Tensor", [](at::Tensor& t, const at::Tensor& s) -> at::Tensor& { return at::native::set_tensor_(t, s); });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("_fused_sdp_choice", sdp_choice);
}

// ---------------------------------------------------------------- control, as torch.ops.simdev.*
TORCH_LIBRARY(simdev, m) {
  m.def("setup(str vendor, int devices) -> ()", [](std::string v, int64_t n) {
    TORCH_CHECK(n >= 0 && n <= kMaxDevices, "0 to ", kMaxDevices, " devices");
    vendor = std::move(v);
    device_count = n;
  });
  m.def("stat(int device, str what) -> int", [](int64_t d, std::string w) -> int64_t {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    auto& p = pool(d < 0 ? -1 : check(d));
    auto& s = p.stats;
    if (w == "allocated") return s.allocated_bytes[0].current;
    if (w == "reserved") return s.reserved_bytes[0].current;
    if (w == "peak_allocated") return s.allocated_bytes[0].peak;
    if (w == "peak_reserved") return s.reserved_bytes[0].peak;
    if (w == "capacity") return p.capacity;
    if (w == "leaked") return p.leaked + p.lost;
    if (w == "ooms") return s.num_ooms;
    if (w == "retries") return s.num_alloc_retries;
    TORCH_CHECK(false, "no such statistic: ", w);
  });
  m.def("empty_cache(int device) -> ()", [](int64_t d) { empty_cache(check(d)); });
  m.def("reset_peak(int device) -> ()", [](int64_t d) { device_allocator.resetPeakStats(check(d)); });
  m.def("capacity(int device, int bytes, int other) -> ()", [](int64_t d, int64_t n, int64_t other) {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    pool(check(d)).capacity = n;
    pool(d).other = other;
  });
  m.def("leak(int device, int bytes, bool forever) -> ()", [](int64_t d, int64_t n, bool forever) {
    std::lock_guard<std::recursive_mutex> g(pool_mx);
    auto& p = pool(check(d));
    if (p.reserved() + p.other + n > p.capacity) release_cached(static_cast<int>(d));
    if (p.reserved() + p.other + n > p.capacity) out_of_memory(d, n);
    (forever ? p.lost : p.leaked) += n;
    p.stats.reserved_bytes[0].increase(n);
  });
  m.def("fault(int after, bool oom, bool sticky, str message) -> ()", [](int64_t n, bool oom, bool sticky, std::string msg) {
    std::lock_guard<std::mutex> g(knobs_mx);
    fault_after = n;
    fault_oom = oom;
    fault_sticky = sticky;
    fault_active = false;
    fault_message = std::move(msg);
  });
  m.def("deny(str op, bool on) -> ()", [](std::string op, bool on) {
    std::lock_guard<std::mutex> g(knobs_mx);
    if (on) denied_ops.insert(op); else denied_ops.erase(op);
  });
  m.def("copy_delay(int us) -> ()", [](int64_t us) { copy_delay_us = us; });
  m.def("counter(str what) -> int", [](std::string what) {
    std::lock_guard<std::mutex> g(knobs_mx);
    return counters[what];
  });
  m.def("reset_counters() -> ()", [] { std::lock_guard<std::mutex> g(knobs_mx); counters.clear(); });
  m.def("any(Tensor t) -> bool");
  m.def("init() -> ()", [] { touch(); });
  m.def("device_count() -> int", []() -> int64_t { return bad_fork ? 0 : device_count; });
  m.def("in_bad_fork() -> bool", [] { return bad_fork; });
}
// Whether a byte of a dense tensor is not zero. No kernel: it is not counted and cannot fail.
bool any(const at::Tensor& t) {
  here(t.device().index()).wait();
  auto* bytes = static_cast<const char*>(t.data_ptr());
  return std::any_of(bytes, bytes + t.nbytes(), [](char byte) { return byte != 0; });
}
TORCH_LIBRARY_IMPL(simdev, PrivateUse1, m) { m.impl("any", any); }
} // namespace sim

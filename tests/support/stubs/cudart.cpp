// Owns a stub of NVIDIA's CUDA runtime (libcudart.so.13) in host memory, to preload under a CUDA build of
// PyTorch: torch.cuda with its own caching allocator, pinned memory, streams and events then runs on
// a machine without a GPU. Kernel launches fail (not supported): see cpu_kernels.cpp.
#include <cuda_runtime_api.h>

#include "common.h"
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
using namespace stub;

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
constexpr auto OK = cudaSuccess;
namespace {
thread_local int device = 0;
thread_local cudaError_t last = OK;
cudaError_t fail(cudaError_t e) { return last = e; }
cudaError_t state() { return knobs.fail ? fail(cudaError_t(knobs.fail)) : OK; }
Queue& queue(cudaStream_t s) { return s ? *reinterpret_cast<Queue*>(s) : null_stream(device); }
Event& event(cudaEvent_t e) { return *reinterpret_cast<Event*>(e); }
}  // namespace

// errors and devices
extern "C" int stub_unsupported() { return fail(cudaErrorNotSupported); }
API cudaGetLastError() {
  auto e = last;
  last = OK;
  return e;
}
API cudaPeekAtLastError() { return last; }
extern "C" const char* cudaGetErrorName(cudaError_t) { return "cudaError (stub)"; }
extern "C" const char* cudaGetErrorString(cudaError_t e) {
  static const std::map<int, const char*> text = {{2, "out of memory"},
                                                  {100, "no CUDA-capable device is detected"},
                                                  {101, "invalid device ordinal"},
                                                  {214, "uncorrectable ECC error encountered"},
                                                  {700, "an illegal memory access was encountered"},
                                                  {719, "unspecified launch failure"},
                                                  {801, "operation not supported"}};
  auto it = text.find(e);
  return it == text.end() ? "error of the stub runtime" : it->second;
}
API cudaGetDeviceCount(int* n) {
  *n = knobs.devices;
  return *n ? OK : fail(cudaErrorNoDevice);
}
API cudaGetDevice(int* d) {
  *d = device;
  return OK;
}
API cudaSetDevice(int d) {
  if (d < 0 || d >= knobs.devices) return fail(cudaErrorInvalidDevice);
  device = d;
  return OK;
}
API cudaDriverGetVersion(int* v) {
  *v = 13000;
  return OK;
}
API cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return OK;
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= knobs.devices) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stub GPU");
  p->major = 9;
  p->totalGlobalMem = knobs.memory;
  p->multiProcessorCount = 16;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = 1024;
  p->warpSize = 32;
  p->sharedMemPerBlock = p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  for (auto& m : p->maxGridSize) m = 65535;
  for (auto& m : p->maxThreadsDim) m = 1024;
  p->textureAlignment = 512;
  return OK;
}
API cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = a == cudaDevAttrComputeCapabilityMajor ? 9 : a == cudaDevAttrMultiProcessorCount ? 16 : 0;
  return OK;
}
API cudaDeviceGetStreamPriorityRange(int* lo, int* hi) {
  *lo = 0;
  *hi = -5;
  return OK;
}
API cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d);
  return OK;
}
API cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return OK;
}
API cudaDeviceSynchronize() {
  synchronize(device);
  return state();
}
API cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                     cudaDriverEntryPointQueryResult* r) {
  bool harmless = !strncmp(name, "cuLogs", 6) || !strncmp(name, "cuCtx", 5);
  *f = harmless ? reinterpret_cast<void*>(+[] { return 0; }) : reinterpret_cast<void*>(+[] { return 801; });
  if (r) *r = cudaDriverEntryPointSuccess;
  return OK;
}

// memory
API cudaMalloc(void** p, size_t n) { return take(p, n, device) ? state() : fail(cudaErrorMemoryAllocation); }
API cudaFree(void* p) {
  if (!p) return OK;
  synchronize(device);
  return give(p) ? OK : fail(cudaErrorInvalidValue);
}
API cudaHostAlloc(void** p, size_t n, unsigned) { return take(p, n, -1) ? OK : fail(cudaErrorMemoryAllocation); }
API cudaFreeHost(void* p) { return give(p) ? OK : fail(cudaErrorInvalidValue); }
// As CUDA does, a refusal also stays the thread's last error (driver_types.h: cudaErrorHostMemoryAlreadyRegistered,
// cudaErrorMemoryAllocation, cudaErrorNotSupported are none that end the process).
API cudaHostRegister(void* p, size_t n, unsigned) {
  if (knobs.refuse_lock) return fail(cudaError_t(knobs.refuse_lock));
  lock(p, n);
  return OK;
}
API cudaHostUnregister(void* p) { return unlock(p) ? OK : fail(cudaErrorHostMemoryNotRegistered); }
API cudaMemGetInfo(size_t* f, size_t* t) {
  *f = unused(device);
  *t = knobs.memory;
  return state();
}
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::mutex> g(mx);
  memset(a, 0, sizeof *a);
  auto* area = find(p);
  a->type = !area ? cudaMemoryTypeUnregistered : area->dev < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = area && area->dev >= 0 ? area->dev : 0;
  return OK;
}
API cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  copy(d, s, n, queue(st));
  return state();
}
API cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  copy(d, s, n, queue(nullptr));
  queue(nullptr).wait();
  return state();
}
API cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  copy(d, s, n, queue(st));
  return state();
}
API cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  queue(st).push([=] { memset(p, v, n); });
  return state();
}
API cudaMemset(void* p, int v, size_t n) {
  memset(p, v, n);
  return state();
}

// streams and events
API cudaStreamCreate(cudaStream_t* s) {
  *s = reinterpret_cast<cudaStream_t>(new_stream(device));
  return OK;
}
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return cudaStreamCreate(s); }
API cudaStreamDestroy(cudaStream_t s) {
  queue(s).wait();
  return OK;
}
API cudaStreamSynchronize(cudaStream_t s) {
  queue(s).wait();
  return state();
}
API cudaStreamQuery(cudaStream_t s) { return queue(s).idle() ? state() : fail(cudaErrorNotReady); }
API cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return OK;
}
API cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* st) {
  *st = cudaStreamCaptureStatusNone;
  return OK;
}
API cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* st, unsigned long long*, cudaGraph_t*,
                             const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *st = cudaStreamCaptureStatusNone;
  return OK;
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return OK; }
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  if (auto m = event(e).mark) queue(s).push([m] { wait(m); });
  return OK;
}
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
  *e = reinterpret_cast<cudaEvent_t>(new Event{!(f & cudaEventDisableTiming)});
  return OK;
}
API cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaEventDestroy(cudaEvent_t e) {
  delete &event(e);
  return OK;
}
API cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  record(event(e), queue(s));
  return OK;
}
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaEventQuery(cudaEvent_t e) { return happened(event(e)) ? state() : fail(cudaErrorNotReady); }
API cudaEventSynchronize(cudaEvent_t e) {
  wait(event(e).mark);
  return state();
}
API cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  if (!event(a).mark || !event(b).mark || !event(a).timed || !event(b).timed)
    return fail(cudaErrorInvalidResourceHandle);
  *ms = between(event(a), event(b));
  return OK;
}

// the compiler's registration of kernels, which are never launched
extern "C" void** __cudaRegisterFatBinary(void*) {
  static void* h;
  return &h;
}
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" void __cudaRegisterFunction(...) {}
extern "C" void __cudaRegisterVar(...) {}
extern "C" char __cudaInitModule(void**) { return 1; }
extern "C" unsigned __cudaPushCallConfiguration(...) { return 0; }

// Owns a stub of Huawei's CANN runtime (libascendcl.so) in host memory: enough for the real torch_npu to
// import, find devices, allocate with its own caching allocator, copy, and use its own streams and
// events on a machine without an NPU. It has no kernels: see cpu_kernels.cpp.
#include <dlfcn.h>

#include <unordered_set>

#include "common.h"
using namespace stub;

#define API extern "C" __attribute__((visibility("default")))
constexpr int OK = 0, NO_DEVICE = 107001, NO_CONTEXT = 107002, BAD_PARAM = 107000, NO_MEMORY = 207001;
namespace {
thread_local int device = -1;
int dev() { return device < 0 ? 0 : device; }
Queue& queue(void* s) { return s ? *static_cast<Queue*>(s) : null_stream(dev()); }
Event& event(void* e) { return *static_cast<Event*>(e); }
int state() { return knobs.fail; }
}  // namespace

// process and devices
API int aclInit(const char*) { return OK; }
API int aclFinalize() { return OK; }
API const char* aclGetRecentErrMsg() { return ""; }
API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
API const char* aclrtGetSocName() { return "Ascend910B3"; }
API int aclrtGetDeviceCount(uint32_t* n) {
  *n = knobs.devices;
  return OK;
}
API int aclrtSetDevice(int32_t d) {
  if (d < 0 || d >= knobs.devices) return NO_DEVICE;
  device = d;
  return OK;
}
API int aclrtResetDevice(int32_t) { return OK; }
API int aclrtGetDevice(int32_t* d) {
  if (device < 0) return NO_CONTEXT;
  *d = device;
  return OK;
}
API int aclrtGetCurrentContext(void** c) {
  if (device < 0) return NO_CONTEXT;
  *c = reinterpret_cast<void*>(intptr_t(device) + 1);
  return OK;
}
API int aclrtSetCurrentContext(void* c) {
  device = intptr_t(c) - 1;
  return OK;
}
API int aclrtGetPrimaryCtxState(int32_t, uint32_t*, int32_t* active) {
  *active = 1;
  return OK;
}
// torch_npu 2.10.0 asks it at each allocation: no stream is being captured. The stub captures none.
API int aclmdlRICaptureGetInfo(void*, int* status, void** model) {
  *status = 0;
  *model = nullptr;
  return OK;
}
API int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return OK;
}
API int aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 1;
  return OK;
}
API int aclGetDeviceCapability(uint32_t, int, int64_t* v) {
  *v = 20;
  return OK;
}
API int aclrtGetDeviceInfo(uint32_t, int, int64_t* v) {
  *v = 20;
  return OK;
}
API int aclrtGetDeviceSatMode(int* m) {
  *m = 1;
  return OK;
}
API int aclrtGetSysParamOpt(int, int64_t* v) {
  *v = 0;
  return OK;
}
API int aclrtCtxGetSysParamOpt(int, int64_t* v) {
  *v = 0;
  return OK;
}
API int aclrtSynchronizeDevice() {
  synchronize(dev());
  return state();
}
API int aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

// memory
API int aclrtMalloc(void** p, size_t n, int) { return take(p, n, dev()) ? OK : NO_MEMORY; }
API int aclrtMallocAlign32(void** p, size_t n, int) { return aclrtMalloc(p, n, 0); }
API int aclrtFree(void* p) { return give(p) ? OK : BAD_PARAM; }
API int aclrtMallocHost(void** p, size_t n) { return take(p, n, -1) ? OK : NO_MEMORY; }
API int aclrtFreeHost(void* p) { return give(p) ? OK : BAD_PARAM; }
// As acl_rt.h of CANN 9 has them. Mapped memory (2) begins on a page; torch_npu asks for no CANN older than 8.5 what an
// address is, and the stub says no version: so to PyTorch this memory stays pageable.
API int aclrtHostRegisterV2(void* p, uint64_t n, uint32_t flags) {
  if (knobs.refuse_lock) return knobs.refuse_lock;
  if (flags != 2 || uintptr_t(p) % 4096) return BAD_PARAM;
  lock(p, n);
  return OK;
}
API int aclrtHostUnregister(void* p) { return unlock(p) ? OK : BAD_PARAM; }
API int aclrtGetMemInfo(int, size_t* f, size_t* t) {
  *f = unused(dev());
  *t = knobs.memory;
  return OK;
}
API int aclrtMemcpyAsync(void* d, size_t max, const void* s, size_t n, int, void* st) {
  if (n > max) return BAD_PARAM;
  copy(d, s, n, queue(st));
  return state();
}
API int aclrtMemcpy(void* d, size_t max, const void* s, size_t n, int) {
  if (n > max) return BAD_PARAM;
  memcpy(d, s, n);
  return state();
}
API int aclrtMemset(void* p, size_t, int32_t v, size_t n) {
  memset(p, v, n);
  return OK;
}
API int aclrtMemsetAsync(void* p, size_t, int32_t v, size_t n, void* s) {
  queue(s).push([=] { memset(p, v, n); });
  return OK;
}

// streams and events
API int aclrtCreateStream(void** s) {
  *s = new_stream(dev());
  return OK;
}
API int aclrtCreateStreamWithConfig(void** s, uint32_t, uint32_t) { return aclrtCreateStream(s); }
API int aclrtDestroyStream(void* s) {
  queue(s).wait();
  return OK;
}
API int aclrtDestroyStreamForce(void* s) { return OK; }
API int aclrtSynchronizeStream(void* s) {
  queue(s).wait();
  return state();
}
API int aclrtSynchronizeStreamWithTimeout(void* s, int32_t) { return aclrtSynchronizeStream(s); }
API int aclrtStreamQuery(void* s, int* status) {
  *status = queue(s).idle() ? 0 : 1;
  return state();
}
API int aclrtCreateEventExWithFlag(void** e, uint32_t) {
  *e = new Event();
  return OK;
}
API int aclrtCreateEventWithFlag(void** e, uint32_t) {
  *e = new Event();
  return OK;
}
API int aclrtDestroyEvent(void* e) {
  delete &event(e);
  return OK;
}
API int aclrtRecordEvent(void* e, void* s) {
  record(event(e), queue(s));
  return OK;
}
API int aclrtStreamWaitEvent(void* s, void* e) {
  if (auto m = event(e).mark) queue(s).push([m] { wait(m); });
  return OK;
}
API int aclrtSynchronizeEvent(void* e) {
  wait(event(e).mark);
  return state();
}
API int aclrtSynchronizeEventWithTimeout(void* e, int32_t) { return aclrtSynchronizeEvent(e); }
API int aclrtQueryEventStatus(void* e, int* st) {
  *st = happened(event(e));
  return state();
}
API int aclrtQueryEventWaitStatus(void* e, int* st) { return aclrtQueryEventStatus(e, st); }
API int aclrtEventElapsedTime(float* ms, void* a, void* b) {
  if (!event(a).mark || !event(b).mark) return BAD_PARAM;
  *ms = between(event(a), event(b));
  return OK;
}

// Linked by name, with nothing to do here,
#define IGNORED(f) \
  API int f(...) { return OK; }
// or which must not succeed.
#define UNSUPPORTED(f) \
  API int f(...) { return BAD_PARAM; }
// torch_npu 2.5 and 2.6 register operators of the graph engine when they load. None is ever made here; the names are
// C++'s own, of ge::OperatorCreatorRegister, ge::AscendString (a shared pointer, here to nothing) and ge::Operator.
API void _ZN2ge12AscendStringC1EPKc(void** self, const char*) { self[0] = self[1] = nullptr; }
// clang-format off
IGNORED(_ZN2ge23OperatorCreatorRegisterC1EPKcRKSt8functionIFNS_8OperatorERKNS_12AscendStringEEE)
IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)
IGNORED(aclCreateDataBuffer)
IGNORED(aclCreateTensorDesc)
IGNORED(aclDestroyDataBuffer)
IGNORED(aclDestroyTensorDesc)
IGNORED(aclGetTensorDescDimV2)
IGNORED(aclGetTensorDescFormat)
IGNORED(aclGetTensorDescNumDims)
IGNORED(aclGetTensorDescType)
IGNORED(aclSetCompileopt)
IGNORED(aclSetTensorDescName)
IGNORED(aclSetTensorFormat)
IGNORED(aclSetTensorPlaceMent)
IGNORED(aclSetTensorShape)
IGNORED(aclmdlFinalizeDump)
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)
IGNORED(aclopCreateAttr)
IGNORED(aclopDestroyAttr)
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)
IGNORED(aclopSetCompileFlag)
IGNORED(aclrtCtxSetSysParamOpt)
IGNORED(aclrtDeviceEnablePeerAccess)
IGNORED(aclrtProcessReport)
IGNORED(aclrtResetEvent)
IGNORED(aclrtSetDeviceSatMode)
IGNORED(aclrtSetOpExecuteTimeOut)
IGNORED(aclrtSetOpWaitTimeout)
IGNORED(aclrtSetStreamFailureMode)
IGNORED(aclrtSetStreamOverflowSwitch)
IGNORED(aclrtSetSysParamOpt)
IGNORED(rtDevBinaryRegister)
IGNORED(rtFunctionRegister)
IGNORED(rtGetC2cCtrlAddr)
UNSUPPORTED(HcclAllGather)
UNSUPPORTED(HcclAllReduce)
UNSUPPORTED(HcclBroadcast)
UNSUPPORTED(HcclCommDestroy)
UNSUPPORTED(HcclCommInitAll)
UNSUPPORTED(HcclCommInitRootInfo)
UNSUPPORTED(HcclGetRootInfo)
UNSUPPORTED(HcclRecv)
UNSUPPORTED(HcclReduceScatter)
UNSUPPORTED(HcclSend)
UNSUPPORTED(_ZN2ge8Operator12AttrRegisterEPKcb)
UNSUPPORTED(_ZN2ge8Operator12AttrRegisterEPKcl)
UNSUPPORTED(_ZN2ge8Operator13InputRegisterEPKc)
UNSUPPORTED(_ZN2ge8Operator14OutputRegisterEPKc)
UNSUPPORTED(_ZN2ge8Operator20DynamicInputRegisterEPKcjb)
UNSUPPORTED(_ZN2ge8Operator20RequiredAttrRegisterEPKc)
UNSUPPORTED(_ZN2ge8Operator27DynamicInputRegisterByIndexEPKcjm)
UNSUPPORTED(_ZN2ge8OperatorC2EPKcS2_)
UNSUPPORTED(_ZN2ge8OperatorC2ERKNS_12AscendStringES3_)
UNSUPPORTED(aclopCompileAndExecute)
UNSUPPORTED(aclopCompileAndExecuteV2)
UNSUPPORTED(aclrtBinaryGetFunction)
UNSUPPORTED(aclrtBinaryLoadFromData)
UNSUPPORTED(aclrtFreePhysical)
UNSUPPORTED(aclrtGetFunctionAddr)
UNSUPPORTED(aclrtMallocPhysical)
UNSUPPORTED(aclrtMapMem)
UNSUPPORTED(aclrtMemExportToShareableHandle)
UNSUPPORTED(aclrtMemImportFromShareableHandle)
UNSUPPORTED(aclrtMemSetPidToShareableHandle)
UNSUPPORTED(aclrtReleaseMemAddress)
UNSUPPORTED(aclrtReserveMemAddress)
UNSUPPORTED(aclrtUnmapMem)
UNSUPPORTED(rtKernelLaunch)
// clang-format on

// torch_npu and torch's own CUDA build name some keys of the allocator's settings alike, and PyTorch ends the process at the
// second. torch_npu needs this library, which is therefore loaded between the two: it takes those of CUDA away.
// Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.10 to 2.14.
[[maybe_unused]] const bool forgotten = [] {
  using Keys = std::unordered_set<std::string>;
  auto* libc10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!libc10) return false;
  const std::string name = "N3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev";
  auto* keys = static_cast<Keys*>(dlsym(libc10, ("_ZZ" + name + "E4keys").c_str()));  // Until torch 2.13.
  if (auto* get = dlsym(libc10, ("_Z" + name).c_str())) keys = &reinterpret_cast<Keys& (*)()>(get)();
  if (!keys) return false;
  for (auto* each : {"pinned_reserve_segment_size_mb", "backend", "graph_capture_record_stream_reuse",
                     "per_process_memory_fraction", "pinned_num_register_threads", "pinned_free_catch_all"})
    keys->erase(each);
  return true;
}();

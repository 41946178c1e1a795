// Owns the CPU kernels for a vendor's own PyTorch backend that runs over a stub driver (cann.cpp, cudart.cpp):
// each operator that the backend implements with device kernels is computed on the CPU instead. What
// the backend does itself (allocation, views, storage, plain copies, streams, events) stays its own.
// Compile with -DKEY=CUDA or -DKEY=PrivateUse1; load when the backend is loaded, then
// torch.ops.stubs.install().
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/contiguous_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <set>

namespace {
using c10::DispatchKey;
constexpr auto kKey = DispatchKey::KEY;
constexpr auto kDev = c10::DeviceType::KEY;
constexpr bool kCuda = kKey == DispatchKey::CUDA;
std::atomic<int64_t> kernels{0};

void drain(const at::Tensor& t) {  // a kernel follows what its stream already holds
  c10::impl::VirtualGuardImpl(kDev).getStream(t.device()).synchronize();
}
at::Tensor alias(const at::Tensor& t) {  // the same memory as a CPU tensor
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).pinned_memory(false));
}
// After every kernel PyTorch asks the runtime for the thread's last error, whoever left it (C10_CUDA_KERNEL_LAUNCH_CHECK
// of c10/cuda/CUDAException.h), and clears it.
void launched() {
  kernels++;
  static auto last = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "cudaGetLastError"));
  static auto text = reinterpret_cast<const char* (*)(int)>(dlsym(RTLD_DEFAULT, "cudaGetErrorString"));
  if (!kCuda || !last) return;
  if (int code = last())
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, std::string("CUDA error: ") + text(code));
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launched();
  // Kernels refuse mixed devices, but take 0-dim CPU tensors as scalars, and CPU indices.
  const auto& name = op.schema().name();
  std::optional<c10::Device> dev, other;
  for (const auto& a : torch::jit::last(*stack, op.schema().arguments().size())) {
    auto see = [&](const at::Tensor& t) {
      if (t.defined() && !(t.is_cpu() && t.dim() == 0)) (t.device().type() == kDev ? dev : other) = t.device();
    };
    if (a.isTensor())
      see(a.toTensor());
    else if (a.isTensorList())
      for (at::Tensor t : a.toTensorList()) see(t);
  }
  TORCH_CHECK(!dev || !other || name.find("index") != std::string::npos || name == "aten::_copy_from_and_resize",
              "Expected all tensors to be on the same device, but found at least two devices, ", *dev, " and ", *other,
              "! (in ", name, ")");
  // (input, dim, half_to_float): the last is not for CPUs
  if (name == "aten::_softmax" || name == "aten::_log_softmax") {
    auto& half_to_float = torch::jit::peek(*stack, 2, 3);
    if (half_to_float.toBool())
      torch::jit::peek(*stack, 0, 3) = torch::jit::peek(*stack, 0, 3).toTensor().to(at::kFloat);
    half_to_float = false;
  }
  at::native::cpu_fallback(op, stack);
}
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {  // npu_dtype_cast(Tensor, dtype, ...)
  auto n = op.schema().arguments().size();
  auto t = torch::jit::peek(*stack, 0, n).toTensor().to(torch::jit::peek(*stack, 1, n).toScalarType());
  torch::jit::drop(*stack, n);
  stack->emplace_back(std::move(t));
}
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(x.device() == w.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", x.device(), " and ",
              w.device());
  launched();
  drain(x);
  auto out =
      at::convolution(alias(x), alias(w), b && b->defined() ? std::optional<at::Tensor>(alias(*b)) : std::nullopt,
                      stride, padding, dilation, transposed, output_padding, groups);
  return out.to(x.device());
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                   bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}
at::Tensor clone(const at::Tensor& t, std::optional<at::MemoryFormat> f) { return at::native::clone(t, f); }
at::Tensor to_copy(const at::Tensor& t, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                   std::optional<at::Device> dev, std::optional<bool> pin, bool non_blocking,
                   std::optional<at::MemoryFormat> f) {
  return at::native::_to_copy(t, dtype, layout, dev, pin, non_blocking, f);
}
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  dst.resize_(src.sizes());
  return dst.copy_(src);
}
std::unique_ptr<c10::SafeKernelFunction> vendor_copy;  // null: PyTorch's own copy_, which knows the device
void copy_(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 3);
  auto dst = args[0].toTensor(), src = args[1].toTensor();
  bool plain = src.dtype() == dst.dtype() && src.sizes() == dst.sizes() && src.is_contiguous() && dst.is_contiguous() &&
               (src.is_cpu() || dst.is_cpu());
  if (plain && vendor_copy) return vendor_copy->callBoxed(op, c10::DispatchKeySet(kKey), stack);
  if (plain) {
    at::native::copy_(dst, src, args[2].toBool());
  } else {  // would need a device kernel to reorder or convert
    for (const auto& t : {src, dst})
      if (t.device().type() == kDev) drain(t);
    alias(dst).copy_(alias(src));
  }
  torch::jit::drop(*stack, 3);
  stack->emplace_back(dst);
}
void same(const c10::OperatorHandle& op, torch::jit::Stack* stack) {  // a cast to a device's private format
  auto n = op.schema().arguments().size();
  auto self = torch::jit::peek(*stack, 0, n);
  torch::jit::drop(*stack, n);
  stack->push_back(self);
}

// the backend's own, which need no device kernel
const std::set<std::string> keep = {"empty",
                                    "empty_strided",
                                    "empty_like",
                                    "new_empty_strided",
                                    "as_strided",
                                    "as_strided_",
                                    "view",
                                    "view_as_real",
                                    "view_as_complex",
                                    "_reshape_alias",
                                    "squeeze",
                                    "unsqueeze",
                                    "unfold",
                                    "alias",
                                    "detach",
                                    "resize_",
                                    "resize_as_",
                                    "set_",
                                    "is_set_to",
                                    "record_stream",
                                    "is_pinned",
                                    "pin_memory",
                                    "_pin_memory",
                                    "_local_scalar_dense",
                                    "_copy_from_and_resize"};
torch::Library& lib(const std::string& ns) {
  static std::map<std::string, torch::Library*> libs;
  auto*& l = libs[ns];
  if (!l) l = new torch::Library(torch::Library::IMPL, ns, kKey, __FILE__, __LINE__);
  return *l;
}
int64_t install() {
  static std::set<std::string> done;  // call it again when a package has brought more operators
  auto& d = c10::Dispatcher::singleton();
  bool first = done.empty();
  auto aten = [](const char* name, auto f) { lib("aten").impl(name, f); };
  int64_t n = 0;
  for (const auto& name : d.getAllOpNames()) {
    auto op = d.findOp(name);
    auto colon = name.name.find("::");
    auto ns = name.name.substr(0, colon), base = name.name.substr(colon + 2);
    if ((ns != "aten" && ns != "torchvision") || keep.count(base) || !op || !op->hasSchema() ||
        !op->hasKernelForDispatchKey(kKey))
      continue;
    if (base == "copy_" && first)
      vendor_copy = std::make_unique<c10::SafeKernelFunction>(op->getComputedKernelForDispatchKey(kKey));
    if (base == "clone" || base == "_to_copy" || base == "copy_" || base == "convolution" ||
        base == "convolution_overrideable" || base == "_fused_sdp_choice")
      continue;
    auto full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!done.insert(ns + full).second) continue;
    lib(ns).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    n++;
  }
  if (!first) return n;
  lib("aten").impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_>());
  aten("clone", clone);
  aten("_to_copy", to_copy);
  aten("_fused_sdp_choice", sdp_choice);
  aten("convolution", convolution);
  if (kCuda) {
    aten("_copy_from_and_resize", copy_from_and_resize);
    at::globalContext().setUserEnabledCuDNN(false);
  } else {
    aten("convolution_overrideable", convolution);
    for (auto f : {"npu_dtype_cast", "_npu_dtype_cast"})
      lib("npu").impl(f, torch::CppFunction::makeFromBoxedFunction<&cast>());
    for (auto f : {"npu_format_cast", "_npu_format_cast"})
      lib("npu").impl(f, torch::CppFunction::makeFromBoxedFunction<&same>());
  }
  return n;
}
}  // namespace
TORCH_LIBRARY(stubs, m) {
  m.def("install() -> int", install);
  m.def("kernels() -> int", []() -> int64_t { return kernels; });
}

// A CUDA device in name, for a torch without CUDA: autograd takes its tensors, nothing is computed on it.
//
// FakeTensorMode needs no device for a forward pass. A backward pass needs two things that a CPU-only torch lacks: hooks
// by which `at::getAccelerator()` finds CUDA, and a device guard with streams and events. `scaled_dot_product_attention`
// takes plain products on devices for which nobody chooses a kernel.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // the name under which the registry looks them up
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Without a context, threads of the autograd engine do not set their device
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace c10::impl {
// torch's own guard for devices without one refuses events, by which the engine orders streams.
struct NamedGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, NamedGuard)
}  // namespace c10::impl

namespace at::native {
// By the rules of torch's own function for CUDA, as far as Forge's calls differ in them: flash takes half precision, no
// mask, and one width of at most 256 for queries, keys and values; the memory-efficient kernel takes all else.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const auto width = query.sym_size(-1);
  const bool half = query.scalar_type() == kHalf || query.scalar_type() == kBFloat16;
  const bool one_width = width == key.sym_size(-1) && width == value.sym_size(-1) && width <= 256;
  if (globalContext().userEnabledFlashSDP() && half && one_width && !mask.has_value()) return 1;
  return globalContext().userEnabledMemEfficientSDP() ? 2 : 0;
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}  // namespace at::native

// Fake GPUs: tensors whose device is `cuda` lie in the machine's memory, and the CPU's kernels compute them.
//
// Each kernel of the dispatch key CUDA is replaced by one that shows the tensors to the CPU's kernel as if they were the
// CPU's. So device checks, autograd, autocast, DDP and FSDP are PyTorch's own. What a GPU would refuse is refused here.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using Stack = torch::jit::Stack;

std::mutex mutex;
int devices = 0;
thread_local int current = 0;  // as with CUDA, a new thread begins with GPU 0
int own = -1;                  // the GPU that this process has used: others would cost a context there, some 400 MB
std::map<std::string, int64_t> counts;
std::set<void*> pinned;
std::map<void*, int64_t> sizes;
int64_t allocated = 0, peak = 0;

void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex);
  counts[what]++;
}

int checked(int index) {
  int device = index < 0 ? current : index;
  TORCH_CHECK(device < devices, "CUDA error: invalid device ordinal: GPU ", device, " of ", devices);
  return device;
}

int use(int index) {  // a context is made where memory is allocated or a device is set
  int device = checked(index);
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(own < 0 || own == device, "fake GPUs: this process uses GPU ", own, ", and here GPU ", device,
              ": a context on another process's GPU takes hundreds of MB there");
  own = device;
  return device;
}

void release(void* context) {
  auto storage = static_cast<c10::Storage*>(context);
  {
    std::lock_guard<std::mutex> lock(mutex);
    allocated -= sizes[context];
    sizes.erase(context);
  }
  delete storage;
}

// The memory of a CPU's storage as that of a GPU, and the other way round, without a copy.
c10::DataPtr as_device(const c10::Storage& storage, Device device) {
  auto context = new c10::Storage(storage);
  void* data = const_cast<void*>(storage.data());
  if (device.is_cpu()) return {data, context, [](void* c) { delete static_cast<c10::Storage*>(c); }, device};
  std::lock_guard<std::mutex> lock(mutex);
  sizes[context] = storage.nbytes();
  allocated += storage.nbytes();
  peak = std::max(peak, allocated);
  return {data, context, release, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto cpu = c10::GetAllocator(c10::kCPU);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, false);
    return as_device(storage, Device(c10::kCUDA, use(-1)));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

struct HostMemory final : c10::Allocator {  // pinned
  c10::DataPtr allocate(size_t bytes) override {
    auto inner = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(inner->get());
    return {inner->get(), inner, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* context) {
      auto inner = static_cast<c10::DataPtr*>(context);
      std::lock_guard<std::mutex> lock(mutex);
      pinned.erase(inner->get());
      delete inner;
    };
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} host_memory;

Tensor view(const c10::Storage& storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sym_sizes(), like.sym_strides(), like.sym_storage_offset());
  return made;
}

Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(tensor.layout() == c10::kStrided, "fake GPUs: it has no sparse tensors");
  const auto& storage = tensor.storage();
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), as_device(storage, c10::kCPU),
                     c10::GetAllocator(c10::kCPU), true);
  auto made = view(alias, tensor, c10::DispatchKey::CPU);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor on_gpu(const Tensor& tensor, int index) {
  const auto& storage = tensor.storage();
  Device device(c10::kCUDA, use(index));
  c10::Storage moved(c10::Storage::use_byte_size_t(), storage.nbytes(), as_device(storage, device), &memory, true);
  return view(moved, tensor, c10::DispatchKey::CUDA);
}

// ---- one kernel for all operators

struct Call {
  std::vector<std::pair<Tensor, Tensor>> shown;  // what is the GPU's, and how the CPU's kernel sees it
  int device = -1;
  bool cpu = false;  // whether a tensor of the CPU that is no number is among the arguments
  bool written_cpu = false;

  Tensor show(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      cpu = cpu || tensor.dim() > 0;
      written_cpu = written_cpu || written;
      return tensor;
    }
    int index = tensor.device().index();
    TORCH_CHECK(device < 0 || device == index, "Expected all tensors to be on the same device, but found at least two ",
                "devices, cuda:", device, " and cuda:", index);
    device = index;
    for (auto& [gpu, seen] : shown)
      if (gpu.is_same(tensor)) return seen;
    shown.emplace_back(tensor, on_cpu(tensor));
    return shown.back().second;
  }

  IValue show(const IValue& value, bool written) {
    if (value.isTensor()) return show(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<Tensor> seen;
      for (const Tensor& tensor : value.toTensorVector()) seen.push_back(show(tensor, written));
      return seen;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> seen;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        seen.push_back(tensor ? std::optional<Tensor>(show(*tensor, written)) : std::nullopt);
      return seen;
    }
    return value;
  }

  Tensor back(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [gpu, seen] : shown) {
      if (seen.is_same(tensor)) return gpu;
      if (seen.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return view(gpu.storage(), tensor, c10::DispatchKey::CUDA);
    }
    return on_gpu(tensor, device);
  }
};

const std::set<std::string> PRODUCTS = {"aten::convolution", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
const std::set<std::string> WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"};

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = schema.arguments().size();
  const std::string& name = schema.name();
  Call call;
  auto first = stack->end() - arguments;
  for (size_t i = 0; i < arguments; i++) {
    auto& value = *(first + i);
    const auto* alias = schema.arguments()[i].alias_info();
    if (value.isDevice()) {
      if (value.toDevice().is_cuda()) {
        call.device = use(value.toDevice().index());
        value = IValue(Device(c10::kCPU));
      }
    } else {
      value = call.show(value, alias && alias->isWrite());
    }
  }
  bool indexing = name.find("index") != std::string::npos;  // indices may be the CPU's
  TORCH_CHECK(!(call.cpu && !indexing) && !call.written_cpu,
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", call.device,
              " and cpu! (", name, ")");
  if (PRODUCTS.count(name)) {
    const auto& tensor = *(first + (name == "aten::addmm" || name == "aten::baddbmm"));
    count("product " + std::string(c10::toString(tensor.toTensor().scalar_type())));
  }
  if (WAITS.count(name)) count("wait " + name);
  op.callBoxed(stack);
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = call.back(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> given;
      for (const Tensor& tensor : value->toTensorVector()) given.push_back(call.back(tensor));
      *value = given;
    }
  }
  for (auto& [gpu, seen] : call.shown) {  // a result that was given as `out` may have got another shape, and memory
    if (gpu.storage().data() != seen.storage().data()) {
      auto* storage = gpu.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(as_device(seen.storage(), gpu.device()));
      storage->set_nbytes(seen.storage().nbytes());
    }
    if (!gpu.sizes().equals(seen.sizes()) || !gpu.strides().equals(seen.strides()))
      gpu.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides());
  }
}

// ---- operators of their own

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  auto where = [](const Tensor& t) { return std::string(t.is_cuda() ? "cuda" : "cpu"); };
  if (self.is_cuda() != from.is_cuda()) {
    const Tensor& host = self.is_cuda() ? from : self;
    bool in_pinned = pinned.count(const_cast<void*>(host.storage().data()));
    count("copy " + where(from) + " to " + where(self) + (in_pinned ? " pinned" : " pageable") +
          (non_blocking ? " non_blocking " : " blocking ") + c10::toString(from.scalar_type()));
  } else {
    TORCH_CHECK(self.device() == from.device(), "fake GPUs: a copy from ", from.device(), " to ", self.device());
  }
  on_cpu(self).copy_(on_cpu(from));
  return self;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DataPtr data = memory.allocate(bytes);
  std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  auto empty = at::empty({0}, self.options());
  return set_tensor(self, empty);
}

void record_stream(Tensor&, c10::Stream) {}

Tensor pin_memory(const Tensor& self, std::optional<Device>) {
  auto bytes = self.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, host_memory.allocate(bytes), nullptr, false);
  count("pin_memory");
  return view(storage, self, c10::DispatchKey::CPU).copy_(self);
}

bool is_pinned(const Tensor& self, std::optional<Device>) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.count(const_cast<void*>(self.storage().data()));
}

// SyncBatchNorm's, which the CPU does not have. Sizes are (batch, channels, ...); sums are in fp32 at least.

std::vector<int64_t> but_channels(const Tensor& t) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < t.dim(); i++)
    if (i != 1) dims.push_back(i);
  return dims;
}
Tensor wide(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t;
}
Tensor channels(const Tensor& t, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return t.view(shape);
}
std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto [variance, mean] = at::var_mean(wide(input), but_channels(input), false);
  return {mean, (variance + eps).rsqrt()};
}
std::tuple<Tensor, Tensor> gather_stats(const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                        const std::optional<Tensor>& running_mean,
                                        const std::optional<Tensor>& running_var, double momentum, double eps,
                                        const Tensor& each) {
  auto n = each.to(mean.scalar_type()).view({-1, 1});
  auto total = n.sum();
  auto common = (mean * n).sum(0) / total;
  auto variance = ((invstd.pow(-2) - eps + (mean - common).square()) * n).sum(0) / total;
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(common * momentum);
  if (running_var && running_var->defined())
    running_var->mul_(1 - momentum).add_(variance * (total / (total - 1)) * momentum);
  return {common, (variance + eps).rsqrt()};
}
Tensor elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
             const Tensor& mean, const Tensor& invstd, double) {
  auto made = (wide(input) - channels(mean, input)) * channels(invstd, input);
  if (weight && weight->defined()) made = made * channels(*weight, input);
  if (bias && bias->defined()) made = made + channels(*bias, input);
  return made.to(input.scalar_type());
}
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd, const std::optional<Tensor>& weight,
                                                           bool, bool, bool) {
  auto dims = but_channels(input);
  auto sum = wide(grad).sum(dims);
  auto product = (wide(grad) * (wide(input) - channels(mean, input))).sum(dims);
  return {sum, product, product * invstd, sum};
}
Tensor backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                      const std::optional<Tensor>& weight, const Tensor& sum, const Tensor& product,
                      const Tensor& each) {
  auto total = each.sum();
  auto made = wide(grad) - channels(sum / total, input) -
              (wide(input) - channels(mean, input)) * channels(product / total * invstd.square(), input);
  made = made * channels(invstd, input);
  if (weight && weight->defined()) made = made * channels(*weight, input);
  return made.to(input.scalar_type());
}

// ---- the device, and DDP's clock

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    int before = current;
    setDevice(device);
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(before)};
  }
  Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(Device device) const override { current = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(c10::kCUDA, device.index() < 0 ? current : device.index()));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &memory; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasCUDA() const override { return devices > 0; }
  bool hasCUDART() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return own == device; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = checked(device); }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned.count(const_cast<void*>(data)); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
};

struct Clock final : c10d::Timer {
  explicit Clock(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    return from == c10d::kUnsetTime || to == c10d::kUnsetTime ? std::nullopt : std::optional<int64_t>(to - from);
  }
};

// ---- NCCL, over Gloo

using Tensors = std::vector<Tensor>;
template <typename T>
using Pointer = c10::intrusive_ptr<T>;

struct Done : c10d::Work {
  explicit Done(Tensors tensors) : tensors(std::move(tensors)) {}
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  Tensors result() override { return tensors; }
  Pointer<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(tensors);
    return future;
  }
  Tensors tensors;
};

struct Nccl final : c10d::Backend {
  Nccl(Pointer<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return false; }
  bool supportsSplitting() const override { return true; }
  Pointer<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  Pointer<c10d::Backend> split(const Pointer<c10d::Store>& store, const std::vector<int>& ranks,
                               const Pointer<Options>& options) override {
    auto child = gloo->split(store, ranks, options);
    if (!child) return nullptr;
    return c10::make_intrusive<Nccl>(child, child->getRank(), child->getSize());
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  Tensor see(const char* what, const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device(), ": NCCL's ", what);
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous: NCCL's ", what);
    int device = use(tensor.device().index());
    count(std::string("nccl ") + what + " cuda:" + std::to_string(device));
    return on_cpu(tensor);
  }
  Tensors see(const char* what, const Tensors& tensors) {
    Tensors seen;
    for (const auto& tensor : tensors) seen.push_back(see(what, tensor));
    return seen;
  }
  std::vector<Tensors> see(const char* what, const std::vector<Tensors>& lists) {
    std::vector<Tensors> seen;
    for (const auto& tensors : lists) seen.push_back(see(what, tensors));
    return seen;
  }
  static Pointer<c10d::Work> done(const Pointer<c10d::Work>& work, Tensors tensors) {
    if (work) work->wait();
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  template <typename Options>
  std::pair<Options, bool> summed(const Options& options) {  // Gloo has no mean
    Options other = options;
    bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) other.reduceOp = c10d::ReduceOp::SUM;
    return {other, mean};
  }

  Pointer<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto seen = see("broadcast", tensors);
    return done(gloo->broadcast(seen, options), tensors);
  }
  Pointer<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto seen = see("allreduce", tensors);
    auto [other, mean] = summed(options);
    auto work = done(gloo->allreduce(seen, other), tensors);
    if (mean) for (auto& tensor : seen) tensor.div_(getSize());
    return work;
  }
  Pointer<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto seen = see("reduce", tensors);
    auto [other, mean] = summed(options);
    auto work = done(gloo->reduce(seen, other), tensors);
    if (mean) for (auto& tensor : seen) tensor.div_(getSize());
    return work;
  }
  Pointer<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) override {
    auto seen = see("allgather", outputs);
    auto from = see("allgather", inputs);
    return done(gloo->allgather(seen, from, options), outputs.at(0));
  }
  Pointer<c10d::Work> all_gather_single(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = see("allgather", output), from = see("allgather", input);
    std::vector<Tensors> parts = {to.view({getSize(), -1}).unbind(0)};
    Tensors flat = {from.view({-1}).clone()};
    return done(gloo->allgather(parts, flat, options), {output});
  }
  Pointer<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return all_gather_single(output, input, options);
  }
  Pointer<c10d::Work> all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) all_gather_single(outputs[i], inputs[i], options);
    return done(nullptr, outputs);
  }
  Pointer<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) override {
    return all_gather_single_coalesced(outputs, inputs, options);
  }
  Pointer<c10d::Work> reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) reduce_scatter_single(outputs[i], inputs[i], options);
    return done(nullptr, outputs);
  }
  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single_coalesced(outputs, inputs, options);
  }
  Pointer<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Pointer<c10d::Work> reduce_scatter_single(Tensor& output, Tensor& input,
                                            const c10d::ReduceScatterOptions& options) override {
    auto to = see("reduce_scatter", output), from = see("reduce_scatter", input);
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM || options.reduceOp == c10d::ReduceOp::AVG,
                "fake GPUs: reduce_scatter has sums and means only");
    Tensors all = {from.clone()};
    gloo->allreduce(all, c10d::AllreduceOptions())->wait();
    auto part = all[0].view({getSize(), -1})[getRank()];
    if (options.reduceOp == c10d::ReduceOp::AVG) part.div_(getSize());
    to.view({-1}).copy_(part);
    return done(nullptr, {output});
  }
  Pointer<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single(output, input, options);
  }
  Pointer<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) override {
    auto input = at::stack(inputs.at(0)).contiguous();
    reduce_scatter_single(outputs.at(0), input, options);
    return done(nullptr, outputs);
  }
  Pointer<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) override {
    auto to = see("scatter", outputs);
    auto from = see("scatter", inputs);
    return done(gloo->scatter(to, from, options), outputs);
  }
  Pointer<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = see("gather", outputs);
    auto from = see("gather", inputs);
    return done(gloo->gather(to, from, options), inputs);
  }
  Pointer<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    use(-1);
    count("nccl barrier cuda:" + std::to_string(current));
    return done(gloo->barrier(options), {});
  }
  Pointer<c10d::Backend> gloo;
};

// ---- switched on

template <typename F>
void impl(torch::Library& library, const char* name, F function) {
  library.impl(name, torch::CppFunction(function));
}

void install(int count_) {
  devices = count_;
  static Guard guard;
  static Hooks hooks;
  // PyTorch has made its hooks already, and offers no way to replace them. They have no members: only functions.
  auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&theirs), static_cast<void*>(&hooks), sizeof(void*));
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(&guard);
  c10::SetAllocator(c10::kCUDA, &memory, 255);
  c10d::TimerRegistry()->Register(
      c10::kCUDA, [](Device device) { return std::unique_ptr<c10d::Timer>(new Clock(device)); }, c10::REGISTRY_PREFERRED);
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto handles = new std::vector<c10::RegistrationHandleRAII>();  // never removed again
  auto boxed = [] { return c10::KernelFunction::makeFromBoxedFunction<&kernel>(); };
  static auto library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static auto host = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  const std::set<std::string> mine = {
      "copy_", "resize_", "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_",
      "record_stream", "batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt",
      "batch_norm_backward_reduce", "batch_norm_backward_elemt"};
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.emplace_back("aten::convolution", "");
  names.emplace_back("aten::convolution_backward", "");
  std::set<std::string> seen;
  for (const auto& name : names) {
    auto space = name.getNamespace();
    auto full = name.name.substr(name.name.find("::") + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!space || (*space != "aten" && *space != "torchvision") || mine.count(full) || !seen.insert(name.name + "." + name.overload_name).second)
      continue;
    handles->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, boxed(), std::nullopt, nullptr, "fake GPUs"));
  }
  handles->push_back(dispatcher.registerFallback(c10::DispatchKey::CUDA, boxed(), "fake GPUs"));
  impl(*library, "copy_", &copy_);
  impl(*library, "resize_", &resize_);
  impl(*library, "set_.source_Storage_storage_offset", &set_storage);
  impl(*library, "set_.source_Storage", &set_source);
  impl(*library, "set_.source_Tensor", &set_tensor);
  impl(*library, "set_", &set_nothing);
  impl(*library, "record_stream", &record_stream);
  impl(*library, "batch_norm_stats", &batch_norm_stats);
  impl(*library, "batch_norm_gather_stats_with_counts", &gather_stats);
  impl(*library, "batch_norm_elemt", &elemt);
  impl(*library, "batch_norm_backward_reduce", &backward_reduce);
  impl(*library, "batch_norm_backward_elemt", &backward_elemt);
  impl(*host, "_pin_memory", &pin_memory);
  impl(*host, "is_pinned", &is_pinned);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::module_::import("torch");
  module.def("install", &install);
  module.def("set_device", [](int index) { current = use(index); });
  module.def("get_device", [] { return current; });
  module.def("exchange_device", [](int index) {
    int before = current;
    if (index >= 0) current = checked(index);
    return before;
  });
  module.def("own", [] { return own; });
  module.def("memory", [] { return std::make_pair(allocated, peak); });
  module.def("reset_peak", [] { peak = allocated; });
  module.def("counts", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return counts;
  });
  module.def("count", &count);
  module.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
  });
  pybind11::class_<Nccl, Pointer<Nccl>, c10d::Backend>(module, "Nccl")
      .def(pybind11::init<Pointer<c10d::Backend>, int, int>());
}

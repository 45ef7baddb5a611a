// A CUDA device for a torch built without CUDA, in the memory of the CPU: for tests, which then run all that Python
// does on a GPU, with its kernels on the simulator (native_runtime.cpp). Its tensors are CUDA tensors to torch: device,
// dispatch key, autograd, autocast, allocator, generator. An operator runs as the CPU's, on the same memory.
//
// Work is done at once, in one order, so nothing here sees a missing wait of one stream for another. A graph that is
// captured does no work, and a replay does what was captured. What would wait for a GPU (a copy to the CPU, item())
// raises an error during a capture, and reported where synchronization is an error.
#include "torch_device.h"

namespace {

// ---- operators

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The tensor's memory as a CPU tensor's, of the same storage, which it keeps alive.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  c10::Storage storage = tensor.storage();
  void* memory = storage.mutable_data();
  auto* alive = new c10::Storage(storage);
  c10::Storage of_cpu(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(memory, alive, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, DeviceType::CPU));
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(of_cpu),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

// A tensor on the GPU as the CPU's operator made it of a tensor on the GPU, of that one's memory.
Tensor view_of(const Tensor& base, const Tensor& cpu) {
  if (!is_ours(base)) return cpu;
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), cpu.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  return result;
}

Tensor empty_like_cpu(const Tensor& cpu) {
  return at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), cpu.scalar_type());
}

Tensor on_gpu(const Tensor& cpu) {
  if (!cpu.defined() || cpu.is_cuda()) return cpu;
  Tensor result = empty_like_cpu(cpu);
  on_cpu(result).copy_(cpu);
  return result;
}

Tensor& resize(Tensor& self, at::IntArrayRef size) {
  auto* impl = self.unsafeGetTensorImpl();
  const c10::Storage storage = self.storage();
  const size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (bytes > storage.nbytes()) {
    auto data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

// The value, with place() of its tensors in their stead.
IValue moved(const IValue& value, Tensor (*place)(const Tensor&)) {
  if (value.isTensor()) return place(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> tensors;
  for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(place(tensor));
  return tensors;
}

IValue of_cpu(const IValue& value) {
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional<Tensor>(on_cpu(*tensor)) : std::nullopt);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(DeviceType::CPU);
  if (value.isGenerator()) return next_of(value.toGenerator());
  return moved(value, on_cpu);
}

void copy_results(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) on_cpu(to.toTensor()).copy_(from.toTensor());
  if (to.isTensorList()) {
    const auto targets = to.toTensorVector(), sources = from.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) on_cpu(targets[i]).copy_(sources[i]);
  }
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
}

const std::set<std::string> kWaiting = {"aten::_local_scalar_dense", "aten::nonzero",       "aten::equal",
                                        "aten::is_nonzero",          "aten::masked_select", "aten::_unique2"};

// As on a GPU, a tensor of the CPU beside the GPU's raises an error, but for a single number, and for indices.
const std::set<std::string> kMixing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

void check_devices(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  bool has_ours = false, has_others = false;
  for (const IValue& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      has_ours = has_ours || is_ours(tensor);
      has_others = has_others || (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0);
    });
  }
  TORCH_CHECK(!has_ours || !has_others || kMixing.count(schema.name()) != 0, "Expected all tensors to be on the same ",
              "device, but found at least two devices, cuda:0 and cpu! (", schema.name(), ")");
}

// Runs the operator on the CPU: arguments in, fresh results out; what aliases an argument is that argument.
std::vector<IValue> run(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& schema = op.schema();
  torch::jit::Stack stack;
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue given = of_cpu(arguments[i]);
    const bool draws = schema.arguments()[i].name() == "generator";
    if (draws && arguments[i].isNone()) given = next_of(default_generator());
    has_generator = has_generator || draws;
    // What has no memory yet grows in the CPU's place.
    if (schema.arguments()[i].is_out() && arguments[i].isTensor() && is_ours(arguments[i].toTensor()) &&
        arguments[i].toTensor().numel() == 0)
      given = at::empty({0}, arguments[i].toTensor().options().device(at::kCPU));
    stack.push_back(given);
  }
  const std::vector<IValue> given(stack.begin(), stack.end());
  {
    const bool takes_the_default = op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator;
    const CpuGeneratorReplaced drawing(takes_the_default);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!schema.arguments()[i].is_out() || !arguments[i].isTensor() || !is_ours(arguments[i].toTensor())) continue;
    Tensor out = arguments[i].toTensor();
    const Tensor& written = given[i].toTensor();
    if (out.numel() == 0 && written.numel() != 0) {
      resize(out, written.sizes());
      on_cpu(out).copy_(written);
    }
  }
  std::vector<IValue> results;
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    IValue result = stack[i];
    for (size_t j = 0; alias != nullptr && j < arguments.size(); ++j) {
      const auto* of_argument = schema.arguments()[j].alias_info();
      if (of_argument == nullptr || of_argument->beforeSets() != alias->beforeSets()) continue;
      result = alias->isWrite() ? arguments[j] : IValue(view_of(arguments[j].toTensor(), stack[i].toTensor()));
    }
    results.push_back(result);
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (kWaiting.count(schema.name()) != 0) synchronises(schema.name().c_str());
  const size_t n = schema.arguments().size();
  const std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  torch::jit::drop(*stack, n);
  check_devices(schema, arguments);
  std::vector<std::pair<Tensor, Tensor>> before;  // what the operator writes, while captured: to be as it was
  if (capture != nullptr) {
    for (size_t i = 0; i < n; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      each_tensor(arguments[i], [&](const Tensor& tensor) {
        if (is_ours(tensor)) before.emplace_back(on_cpu(tensor), on_cpu(tensor).clone());
      });
    }
  }
  std::vector<IValue> results = run(op, arguments), made;
  for (const IValue& result : results) {
    made.push_back(moved(result, on_gpu));
    stack->push_back(made.back());
  }
  if (capture != nullptr) {
    for (auto& [tensor, value] : before) tensor.copy_(value);
    capture.load()->work.push_back([op, arguments, made] {
      const std::vector<IValue> again = run(op, arguments);
      for (size_t i = 0; i < made.size(); ++i) {
        if (!again[i].isTensor() || !is_ours(again[i].toTensor())) copy_results(made[i], again[i]);
      }
    });
  }
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.is_cuda()) synchronises("a copy to the CPU");
  if (self.is_cuda() && !from.is_cuda() && !non_blocking) synchronises("a copy from pageable memory");
  const auto work = [self, from] { on_cpu(self).copy_(on_cpu(from)); };
  if (capture != nullptr) {
    capture.load()->work.push_back(work);
  } else {
    work();
  }
  return self;
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  Tensor writable = self;
  resize(writable, size);
  return self;
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                    offset.expect_int());
  return self;
}
Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(size)}),
                     c10::SymIntArrayRef({c10::SymInt(1)}));
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

void record_stream(Tensor&, c10::Stream) {}

// Products that torch has on GPUs alone: half-precision operands, a float32 result.
Tensor wide_product(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
Tensor& add_wide_product(const Tensor& to, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                         const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, to, a.to(dtype), b.to(dtype), beta, alpha);
}

}  // namespace

namespace at {
using SimulatedHooks = ::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks);
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  library.impl("mm.dtype", &wide_product);
  library.impl("addmm.dtype_out", &add_wide_product);
}

// Called by the native library's launches (native_runtime.cpp): whether a capture keeps the work for later.
extern "C" bool cudasim_capture(const std::function<void()>& work) {
  if (capture.load() == nullptr) return false;
  capture.load()->work.push_back(work);
  return true;
}

namespace py = pybind11;

PYBIND11_MODULE(torch_device, module) {
  c10::SetAllocator(DeviceType::CUDA, &allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
  py::class_<Graph>(module, "Graph").def("replay", [](const Graph& graph) {
    for (const auto& work : graph.work) work();
  });
  module.def("begin_capture", [] { capture = new Graph; });
  module.def("end_capture", [] { return std::unique_ptr<Graph>(capture.exchange(nullptr)); });
  module.def("captures", &cudasim_capture, "Whether a graph is captured, which keeps this work for later.");
  module.def("keep_default_generator", [] { default_generator(); });
  module.def("is_capturing", [] { return capture.load() != nullptr; });
  module.def("set_sync_mode", [](int mode) { sync_mode = mode; });
  module.def("current_stream", [] { return current_stream; });
  module.def("set_current_stream", [](int64_t stream) { current_stream = stream; });
  module.def("allocated", [] { return allocated.load(); });
  module.def("peak", [] { return peak.load(); });
  module.def("reset_peak", [] { peak = allocated.load(); });
}

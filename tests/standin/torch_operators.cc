// Arithmetic for torch's CUDA build: each operator that has a CUDA kernel is computed on the host.
//
// An operator waits until the current stream has come to it, as a kernel does, and reads its operands where streams find
// them. Its results are written late, on the current stream. Operators that need no kernel stay torch's own: empty
// tensors, views, copies between equal layouts, item().
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

extern "C" {
void* standin_reached(void* address);
int standin_enqueue(void* stream, void (*work)(void*), void* argument);
int standin_settle(void* stream);
int standin_is_captured(void* stream);
int standin_fail_on_stream(void* stream, int code);
}

namespace {

using Values = std::vector<c10::IValue>;

void* stream_of(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

// The default stream of each device has the same handle, which means that of the current device.
void wait_for_operands(c10::Device device) {
  const c10::DeviceGuard guard(device);
  const int code = standin_settle(stream_of(device));
  C10_CUDA_CHECK(static_cast<cudaError_t>(code));
}

// Returns a tensor of the host that has the same memory. It does not keep the memory, as a kernel does not.
at::Tensor in_place(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  at::Tensor found =
      at::from_blob(standin_reached(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options.requires_grad(false));
  if (tensor.is_conj()) found = found.conj();
  return tensor.is_neg() ? found._neg_view() : found;
}

at::Tensor with_own_memory(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).copy_(tensor);
}

struct Written {
  at::Tensor target;
  at::Tensor values;
};

// Lets the current stream write `values`, of the host, into a tensor of the device.
void write_late(const at::Tensor& target, at::Tensor values) {
  if (target.numel() == 0) return;
  const auto run = [](void* held) {
    const std::unique_ptr<Written> write(static_cast<Written*>(held));
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    write->target.copy_(write->values);
  };
  const c10::DeviceGuard guard(target.device());
  auto write = std::make_unique<Written>(Written{in_place(target), std::move(values)});
  const int code = standin_enqueue(stream_of(target.device()), run, write.release());
  C10_CUDA_CHECK(static_cast<cudaError_t>(code));
}

// Replaces each tensor of a value.
template <typename Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      changed.push_back(each.has_value() ? std::optional(change(*each)) : std::nullopt);
    value = changed;
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns the device of an operator: that of its tensors, or the one on which it makes a tensor.
c10::Device device_of(const c10::OperatorHandle& op, Values arguments) {
  std::optional<c10::Device> device;
  for (c10::IValue& each : arguments) {
    if (each.isDevice() && each.toDevice().is_cuda() && !device) device = each.toDevice();
    change_tensors(each, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && !device) device = tensor.device();
      return tensor;
    });
  }
  TORCH_CHECK(device.has_value(), op.operator_name(), ": no argument is on a stand-in device");
  if (!device->has_index()) device = c10::Device(at::kCUDA, c10::cuda::getCurrentCUDAStream().device_index());
  return *device;
}

// Moves the arguments to the host. What the operator writes is a copy, whose values the stream writes later.
std::vector<Written> move_arguments(const c10::FunctionSchema& schema, c10::IValue* arguments) {
  std::vector<Written> written;
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    c10::IValue& argument = arguments[place];
    const bool writes = is_written(schema.arguments()[place]);
    if (argument.isDevice()) {
      argument = c10::Device(at::kCPU);
    } else if (argument.isGenerator()) {
      argument = c10::IValue();  // the host's own
    }
    change_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      at::Tensor moved = in_place(tensor);
      if (!writes) return moved;
      moved = with_own_memory(moved);
      written.push_back({tensor, moved});
      return moved;
    });
  }
  return written;
}

// Returns a sparse tensor of the device with the entries of a sparse tensor of the host.
at::Tensor sparse_on_device(const at::Tensor& tensor, c10::Device device) {
  return at::_sparse_coo_tensor_unsafe(tensor._indices().to(device), tensor._values().to(device), tensor.sizes(),
                                       tensor.options().device(device))
      ._coalesced_(tensor.is_coalesced());
}

// Replaces each result: by the argument that it is, or by a new tensor of the device, whose values `keep` sees to.
template <typename Keep>
void move_results(const c10::FunctionSchema& schema, const Values& arguments, c10::IValue* results, c10::Device device,
                  Keep keep) {
  for (size_t place = 0; place < schema.returns().size(); ++place) {
    const auto* alias = schema.returns()[place].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t each = 0; each < arguments.size(); ++each)
        if (is_written(schema.arguments()[each]) &&
            schema.arguments()[each].alias_info()->beforeSets() == alias->beforeSets())
          results[place] = arguments[each];
      continue;
    }
    change_tensors(results[place], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cpu()) return tensor;
      if (tensor.is_sparse()) return sparse_on_device(tensor, device);
      const at::Tensor values = tensor.resolve_conj().resolve_neg();
      at::Tensor made = at::empty_strided(values.sizes(), values.strides(), values.options().device(device));
      keep(made, values);
      return made;
    });
  }
}

// Whether the operator stops the host on a device: its result is no tensor, or a tensor whose size depends on values.
bool stops_the_host(const c10::FunctionSchema& schema, const Values& arguments) {
  static const std::unordered_set<std::string> kSizedByValues = {
      "aten::nonzero",      "aten::masked_select", "aten::_unique",  "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
  static const std::unordered_set<std::string> kIndexed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  for (const c10::Argument& each : schema.returns()) {
    const auto kind = each.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  if (kIndexed.contains(schema.name())) {
    for (const std::optional<at::Tensor>& each : arguments[1].toOptionalTensorVector())
      if (each.has_value() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  }
  return kSizedByValues.contains(schema.name());
}

// Computes an operator whose arguments are on the host. Returns false if an index is out of bounds: the operator is then
// computed with indices of 0.
bool compute(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t first) {
  const torch::jit::Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return true;
  } catch (const c10::IndexError&) {
    stack->resize(first);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
  }
  for (size_t place = first; place < stack->size(); ++place)
    change_tensors((*stack)[place], [](const at::Tensor& tensor) {
      const bool is_index = tensor.defined() && (tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt);
      return is_index ? at::zeros_like(tensor) : tensor;
    });
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  return false;
}

// An operator of a captured stream, which each launch of the graph computes again on the same memory.
class Captured {
 public:
  Captured(const c10::OperatorHandle& op, const Values& arguments) : op_(op), arguments_(arguments) {
    for (size_t place = 0; place < arguments_.size(); ++place) {
      c10::IValue& argument = arguments_[place];
      if (argument.isDevice()) argument = c10::Device(at::kCPU);
      if (argument.isGenerator()) argument = c10::IValue();
      change_tensors(argument, [](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_cuda() ? in_place(tensor) : tensor;
      });
    }
  }
  // Adds a result of the operator, in the order in which the operator returns tensors.
  void add_result(const at::Tensor& tensor) { results_.push_back(in_place(tensor)); }

  void run() const {
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    const auto& schema = op_.schema();
    torch::jit::Stack stack(arguments_.begin(), arguments_.end());
    std::vector<Written> written;
    for (size_t place = 0; place < stack.size(); ++place)
      if (is_written(schema.arguments()[place]))
        change_tensors(stack[place], [&](const at::Tensor& tensor) {
          written.push_back({tensor, with_own_memory(tensor)});
          return written.back().values;
        });
    compute(op_, &stack, 0);
    for (const auto& [target, values] : written) target.copy_(values);
    size_t next = 0;
    for (size_t place = 0; place < stack.size(); ++place) {
      const auto* alias = schema.returns()[place].alias_info();
      if (alias != nullptr && alias->isWrite()) continue;
      change_tensors(stack[place], [&](const at::Tensor& tensor) {
        if (tensor.defined() && next < results_.size()) results_[next++].copy_(tensor);
        return tensor;
      });
    }
  }

 private:
  c10::OperatorHandle op_;
  Values arguments_;
  std::vector<at::Tensor> results_;
};

// Adds the operator to the stream's capture. It is computed once now, for the sizes of its results.
void capture(const c10::OperatorHandle& op, const Values& arguments, torch::jit::Stack* stack, size_t first,
             c10::Device device) {
  const c10::FunctionSchema& schema = op.schema();
  auto captured = std::make_unique<Captured>(op, arguments);
  move_arguments(schema, stack->data() + first);
  compute(op, stack, first);
  move_results(schema, arguments, stack->data() + first, device,
               [&](const at::Tensor& made, const at::Tensor&) { captured->add_result(made); });
  const auto run = [](void* held) { static_cast<const Captured*>(held)->run(); };  // the graph keeps it for ever
  standin_enqueue(stream_of(device), run, captured.release());
}

// Counts a change of each tensor that a foreach operator writes, as the kernels of torch's CUDA build do themselves
// (increment_version of ForeachFunctors.cuh). Other operators are counted before a kernel is reached, or, as
// _amp_foreach_non_finite_check_and_unscale_, not at all.
void count_changes(const c10::FunctionSchema& schema, const Values& arguments) {
  if (!schema.name().starts_with("aten::_foreach_")) return;
  for (size_t place = 0; place < arguments.size(); ++place)
    if (is_written(schema.arguments()[place]) && arguments[place].isTensorList())
      for (const at::Tensor& each : arguments[place].toTensorVector()) each.unsafeGetTensorImpl()->bump_version();
}

void compute_on_the_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const c10::FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const Values arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  count_changes(schema, arguments);
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard guard(device);
  if (stops_the_host(schema, arguments)) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  if (standin_is_captured(stream_of(device)) != 0)
    return capture(op, arguments, stack, first, device);
  wait_for_operands(device);
  for (c10::IValue each : arguments)  // a list may have tensors of several devices
    change_tensors(each, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && tensor.device() != device) wait_for_operands(tensor.device());
      return tensor;
    });
  const std::vector<Written> written = move_arguments(schema, stack->data() + first);
  if (!compute(op, stack, first))  // as an assertion of a kernel
    standin_fail_on_stream(stream_of(device), cudaErrorAssert);
  for (const auto& [target, values] : written) {
    if (target.sizes() != values.sizes()) target.resize_(values.sizes());
    write_late(target, values);
  }
  move_results(schema, arguments, stack->data() + first, device,
               [](const at::Tensor& made, const at::Tensor& values) { write_late(made, with_own_memory(values)); });
}

bool have_equal_layouts(const at::Tensor& left, const at::Tensor& right) {
  const bool is_plain = !left.is_conj() && !left.is_neg() && !right.is_conj() && !right.is_neg();
  const bool is_dense = left.is_non_overlapping_and_dense() && left.strides() == right.strides();
  return is_plain && left.dtype() == right.dtype() && left.sizes() == right.sizes() &&
         (is_dense || (left.is_contiguous() && right.is_contiguous()));
}

void capture_copy(const at::Tensor& target, const at::Tensor& source) {
  const auto run = [](void* held) {
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    static_cast<Written*>(held)->target.copy_(static_cast<Written*>(held)->values);
  };
  const at::Tensor from = source.is_cuda() ? in_place(source) : source.clone();
  standin_enqueue(stream_of(target.device()), run, new Written{in_place(target), from});  // the graph keeps it for ever
}

// torch's own copy is one copy of the runtime. A copy that changes the type or the layout is a kernel.
at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool is_non_blocking) {
  if (target.numel() == 0) return target;
  if (have_equal_layouts(target, source)) return at::native::copy_(target, source, is_non_blocking);
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const c10::OptionalDeviceGuard guard(target.is_cuda() ? std::optional(target.device()) : std::nullopt);
  if (target.is_cuda() && standin_is_captured(stream_of(target.device())) != 0) {
    capture_copy(target, source);
    return target;
  }
  for (const at::Tensor* each : {&source, static_cast<const at::Tensor*>(&target)})
    if (each->is_cuda()) wait_for_operands(each->device());
  const at::Tensor values = source.is_cuda() ? in_place(source) : source;
  if (!target.is_cuda()) return target.copy_(values);
  write_late(target, with_own_memory(values.to(target.scalar_type()).expand(target.sizes()).contiguous()));
  return target;
}

// Sums the values of equal indices, which torch does with kernels of its own.
at::Tensor coalesce(const at::Tensor& tensor) {
  return tensor.to(at::kCPU).coalesce().to(tensor.device());
}

// Gives a sparse tensor of the device the entries of a sparse tensor of the host.
void replace_entries(const at::Tensor& target, const at::Tensor& source) {
  auto* impl = at::sparse::get_sparse_impl(target);
  impl->raw_resize_(source.sparse_dim(), source.dense_dim(), source.sizes());
  impl->set_indices_and_values_unsafe(source._indices().to(target.device()), source._values().to(target.device()));
  target._coalesced_(source.is_coalesced());
}

// An operator with sparse operands: the host waits for the device, computes, and copies the results.
void compute_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const c10::FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const Values arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard guard(device);
  std::vector<Written> written;
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    c10::IValue& argument = (*stack)[first + place];
    if (argument.isDevice()) argument = c10::Device(at::kCPU);
    change_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      at::Tensor moved = tensor.to(at::kCPU);
      if (is_written(schema.arguments()[place])) written.push_back({tensor, moved});
      return moved;
    });
  }
  op.callBoxed(stack);
  for (const auto& [target, values] : written) {
    if (target.is_sparse()) {
      replace_entries(target, values);
    } else {
      target.copy_(values);
    }
  }
  move_results(schema, arguments, stack->data() + first, device,
               [](const at::Tensor& made, const at::Tensor& values) { write_late(made, with_own_memory(values)); });
}

// torch would warn that each operator has a kernel already.
class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// Gives the operators named `names` their arithmetic, and those named `sparse_names` for sparse operands.
extern "C" __attribute__((visibility("default"))) void standin_install(const char* const* names, int count,
                                                                       const char* const* sparse_names,
                                                                       int sparse_count) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (int each = 0; each < count; ++each)
    library->impl(names[each], torch::CppFunction::makeFromBoxedFunction<&compute_on_the_host>());
  library->impl("copy_", torch::CppFunction::makeFromUnboxedFunction(TORCH_FN(copy)));
  static auto* sparse =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA, __FILE__, __LINE__);
  for (int each = 0; each < sparse_count; ++each)
    sparse->impl(sparse_names[each], torch::CppFunction::makeFromBoxedFunction<&compute_sparse>());
  sparse->impl("_coalesce", torch::CppFunction::makeFromUnboxedFunction(TORCH_FN(coalesce)));
}

// PyTorch's operations on the test device. All but a few run as the CPU's, on the same memory. Each
// is one launch, unless it only looks at memory in another way; those that a GPU cannot do without
// the host waiting are counted too.
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <unordered_set>

#include "driver.h"
#include "runtime.h"

namespace standin {

namespace {

using at::Tensor;
using c10::IValue;

void use_tensor(const Tensor& tensor, const std::string& what, bool writes) {
    if (!tensor.numel()) return;
    int64_t elements = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
    use(tensor.device(), what, tensor.const_data_ptr(), elements * tensor.element_size(), writes);
}

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
    const auto options = tensor.options().device(at::kCPU).requires_grad(false);
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .strides(tensor.strides())
        .options(options)
        .make_tensor();
}

at::CPUGeneratorImpl& engine_of(const at::Generator& generator) {
    return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

// One operation, with its tensors replaced by those of the CPU and its results by those of the
// device.
class Fallback {
  public:
      explicit Fallback(const c10::OperatorHandle& operation)
          : operation_(operation), schema_(operation.schema()) {}

      void run(torch::jit::Stack* stack) {
          const size_t count = schema_.arguments().size();
          const auto first = stack->end() - static_cast<std::ptrdiff_t>(count);
          for (size_t i = 0; i < count; ++i) first[i] = argument(first[i], schema_.arguments()[i]);
          const c10::DeviceGuard guard(device_);
          {
              const at::AutoDispatchBelowADInplaceOrView below;
              operation_.callBoxed(stack);
          }
          for (auto& [ours, host] : resized_) {
              ours.resize_(host.sizes());
              on_host(ours).copy_(host);
          }
          if (generator_.defined()) {
              engine_of(generator_).set_engine(engine_of(host_generator_).engine());
          }
          const size_t results = schema_.returns().size();
          bool launched = results == 0;
          for (auto it = stack->end() - static_cast<std::ptrdiff_t>(results); it != stack->end();
               ++it) {
              *it = result(*it, launched);
          }
          if (!launched) return;
          tell(kLaunch, name());
          for (const Tensor& read : read_) use_tensor(read, name(), false);
          for (const Tensor& written : written_) use_tensor(written, name(), true);
    }

    std::string name() const { return schema_.name().substr(schema_.name().find("::") + 2); }

  private:
    Tensor to_host(const Tensor& tensor, bool written) {
        // None, or a number.
        if (!tensor.defined() || (!is_ours(tensor) && !tensor.dim() && !written)) return tensor;
        if (pairs_.empty() && is_ours(tensor)) device_ = tensor.device();
        TORCH_CHECK(tensor.device() == device_, name(), " was given tensors on ", device_,
                    " and on ", tensor.device(), "; they must lie on one device");
        (written ? written_ : read_).push_back(tensor);
        for (const auto& [ours, host] : pairs_) {
            if (ours.is_same(tensor)) return host;
        }
        if (written && !tensor.numel()) {
            Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
            resized_.emplace_back(tensor, host);
            pairs_.emplace_back(tensor, host);
            return host;
        }
        return pairs_.emplace_back(tensor, on_host(tensor)).second;
    }

    IValue argument(const IValue& value, const c10::Argument& declared) {
        const bool written = declared.alias_info() && declared.alias_info()->isWrite();
        if (value.isTensor()) return to_host(value.toTensor(), written);
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& one : value.toTensorVector()) list.push_back(to_host(one, written));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> list;
            for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
                list.push_back(one ? std::optional(to_host(*one, written)) : std::nullopt);
            }
            return list;
        }
        if (value.isDevice() && value.toDevice().type() == kType) {
            if (value.toDevice().has_index()) device_ = value.toDevice();
            return c10::Device(at::kCPU);
        }
        if (declared.name() == "generator") {
            generator_ = value.isNone() ? default_generator(device_.index()) : value.toGenerator();
            host_generator_ = at::make_generator<at::CPUGeneratorImpl>();
            engine_of(host_generator_).set_engine(engine_of(generator_).engine());
            return host_generator_;
        }
        return value;
    }

    IValue result(const IValue& value, bool& launched) {
        if (value.isTensor()) return from_host(value.toTensor(), launched);
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& one : value.toTensorVector())
                list.push_back(from_host(one, launched));
            return list;
        }
        launched = true;
        return value;
    }

    Tensor from_host(const Tensor& host, bool& launched) {
        if (!host.defined()) return host;
        for (const auto& [ours, given] : pairs_) {
            if (given.is_same(host)) {
                launched = true;
                return ours;
            }
        }
        for (const auto& [ours, given] : pairs_) {
            if (host.storage().is_alias_of(given.storage())) {  // a view
                const int64_t offset = host.storage_offset() + ours.storage_offset();
                return at::as_strided(ours, host.sizes(), host.strides(), offset);
            }
        }
        launched = true;
        Tensor made =
            at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
        on_host(made).copy_(host);
        written_.push_back(made);
        return made;
    }

    const c10::OperatorHandle& operation_;
    const c10::FunctionSchema& schema_;
    c10::Device device_ = current_device();
    std::vector<std::pair<Tensor, Tensor>> pairs_, resized_;
    std::vector<Tensor> read_, written_;
    at::Generator generator_, host_generator_;
};

// A GPU hands a number or a shape back to the host.
const std::unordered_set<std::string> kWaiting = {
    "nonzero",     "masked_select",     "unique_dim",
    "_unique",     "_unique2",          "unique_consecutive",
    "equal",       "bincount",          "histc",
    "multinomial", "repeat_interleave",
};

bool is_mask(const std::optional<Tensor>& index) {
    return index && index->defined() &&
           (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
}

// To write where a mask says takes a look at the mask; to read there, PyTorch calls nonzero.
bool waits(const std::string& name, const torch::jit::Stack& stack, size_t count) {
    if (name != "_index_put_impl_") return kWaiting.count(name);
    const auto indices =
        (stack.end() - static_cast<std::ptrdiff_t>(count) + 1)->toOptionalTensorVector();
    return std::any_of(indices.begin(), indices.end(), is_mask);
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    Fallback one(operation);
    const bool waiting = waits(one.name(), *stack, operation.schema().arguments().size());
    if (waiting) tell(kWait, one.name());
    one.run(stack);
    if (waiting) synchronize_stream(current_stream(current_device()));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pinned.value_or(false), "memory of the test device cannot be pinned");
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, allocator(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, stride, allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
    const bool to_device = is_ours(to), from_device = is_ours(from);
    const std::string name = !from_device ? "copy to the device"
                             : to_device  ? "copy_"
                                          : "copy to the host";
    const Tensor& host = to_device ? from : to;
    const bool waits = to.numel() && !(to_device && from_device) &&
                       !(non_blocking && is_pinned(host.const_data_ptr()));
    if (to.numel()) tell(waits ? kWait : kLaunch, name);
    const c10::DeviceGuard guard(to_device ? to.device() : from.device());
    if (from_device) use_tensor(from, name, false);
    if (to_device) use_tensor(to, name, true);
    (to_device ? on_host(to) : to).copy_(from_device ? on_host(from) : from);
    if (waits) synchronize_stream(current_stream(current_device()));
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
    tell(kWait, "item");
    use_tensor(tensor, "item", false);
    synchronize_stream(current_stream(tensor.device()));
    return on_host(tensor).item();
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
    return at::native::resize_(tensor, size, format);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
    return at::native::set_tensor_(self, source);
}
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
    return at::cpu::set_(self, storage, offset, size, stride);
}

void record_tensor(Tensor& tensor, c10::Stream stream) {
    record_stream(tensor.storage().data_ptr().get_context(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("view",
                 static_cast<Tensor (*)(const Tensor&, c10::IntArrayRef)>(&at::native::view));
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("unfold", &at::native::unfold);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_local_scalar_dense", &local_scalar);
    library.impl("resize_", &resize);
    library.impl("set_.source_Tensor", &set_tensor);
    library.impl("set_.source_Storage", &set_storage);
    library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
    library.impl("record_stream", &record_tensor);
    // One kernel on CUDA, but many pieces for a device that PyTorch does not know.
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto begins = [&](const char* with) { return name.name.rfind(with, 0) == 0; };
        const bool fused = begins("aten::native_layer_norm") || begins("aten::native_dropout") ||
                           begins("aten::_foreach_") || begins("aten::_fused_adam");
        if (!fused || name.overload_name.find("out") != std::string::npos) continue;
        const std::string full =
            name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

}  // namespace

}  // namespace standin

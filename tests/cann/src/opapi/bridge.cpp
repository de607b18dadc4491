// The one file that knows ATen: calls its CPU kernels by name.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <mutex>

#include "tensor.h"

namespace cpu {

struct Handle {
  at::Tensor tensor;
};

namespace {

// CPU kernels only: whatever modes the calling program has switched on (tracing, dispatch modes, autocast) stay outside.
// BackendSelect is included as it is by default: it finds the kernel of calls without a tensor, such as empty().
struct PlainDispatch {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect), c10::DispatchKeySet(c10::DispatchKeySet::FULL) - c10::DispatchKeySet(c10::DispatchKey::CPU) -
                                 c10::DispatchKeySet(c10::DispatchKey::BackendSelect)};
};

const at::Tensor& aten(const Tensor& tensor) {
  if (!tensor.defined()) throw Error("an undefined tensor is used");
  return tensor.handle().tensor;
}

Tensor wrap(at::Tensor tensor) { return Tensor(std::make_shared<const Handle>(Handle{std::move(tensor)})); }

at::ScalarType aten(Type type) { return static_cast<at::ScalarType>(type); }

// How well a value fits a parameter; 0 not at all.
int fit(const Value& value, const c10::Type& type) {
  if (auto optional = type.cast<c10::OptionalType>()) {
    return std::holds_alternative<std::monostate>(value.value) ? 2 : fit(value, *optional->getElementType());
  }
  c10::TypeKind kind = type.kind();
  switch (value.value.index()) {
    case 1: return kind == c10::TypeKind::TensorType ? 3 : 0;
    case 2: return kind == c10::TypeKind::BoolType ? 3 : kind == c10::TypeKind::NumberType ? 2 : 0;
    case 3: return kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType ? 3 : kind == c10::TypeKind::NumberType ? 2 : kind == c10::TypeKind::FloatType ? 1 : 0;
    case 4: return kind == c10::TypeKind::FloatType ? 3 : kind == c10::TypeKind::NumberType ? 2 : 0;
    case 5: {
      auto list = type.cast<c10::ListType>();
      if (list == nullptr) return 0;
      c10::TypeKind element = list->getElementType()->kind();
      return element == c10::TypeKind::IntType || element == c10::TypeKind::SymIntType ? 3 : 0;
    }
    case 6: {
      auto list = type.cast<c10::ListType>();
      if (list == nullptr) return 0;
      c10::TypePtr element = list->getElementType();
      if (auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
      return element->kind() == c10::TypeKind::TensorType ? 3 : 0;
    }
    case 7: return kind == c10::TypeKind::StringType ? 3 : 0;
    case 8: return kind == c10::TypeKind::ScalarTypeType ? 3 : 0;
    default: return 0;
  }
}

c10::IValue convert(const Value& value, const c10::Type& type) {
  if (auto optional = type.cast<c10::OptionalType>()) {
    if (std::holds_alternative<std::monostate>(value.value)) return c10::IValue();
    return convert(value, *optional->getElementType());
  }
  switch (value.value.index()) {
    case 1: return aten(std::get<Tensor>(value.value));
    case 2: return std::get<bool>(value.value);
    case 3: {
      int64_t number = std::get<int64_t>(value.value);
      return type.kind() == c10::TypeKind::FloatType ? c10::IValue(static_cast<double>(number)) : c10::IValue(number);
    }
    case 4: return std::get<double>(value.value);
    case 5: return std::get<Ints>(value.value);
    case 6: {
      const auto& tensors = std::get<std::vector<Tensor>>(value.value);
      if (type.cast<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> list;
        for (const Tensor& tensor : tensors) list.push_back(aten(tensor));
        return list;
      }
      c10::List<std::optional<at::Tensor>> list;
      for (const Tensor& tensor : tensors) list.push_back(tensor.defined() ? std::optional<at::Tensor>(aten(tensor)) : std::nullopt);
      return list;
    }
    case 7: return std::get<std::string>(value.value);
    case 8: return static_cast<int64_t>(std::get<Type>(value.value));
    default: return c10::IValue();
  }
}

int fit(const c10::FunctionSchema& schema, const std::vector<Value>& values) {
  if (values.size() > schema.arguments().size()) return 0;
  int total = 1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.is_out() || (i >= values.size() && !argument.default_value().has_value())) return 0;
    if (i >= values.size()) continue;
    int score = fit(values[i], *argument.real_type());
    if (score == 0) return 0;
    total += score;
  }
  return total;
}

const std::vector<c10::OperatorHandle>& overloads_of(const std::string& name) {
  static const auto* table = [] {
    auto* all = new std::map<std::string, std::vector<c10::OperatorHandle>>;
    for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
      if (op.name.rfind("aten::", 0) != 0) continue;
      if (auto handle = c10::Dispatcher::singleton().findSchema(op)) {
        (*all)[op.name.substr(6)].push_back(*handle);
        (*all)[op.name.substr(6) + "." + op.overload_name].push_back(*handle);
      }
    }
    return all;
  }();
  auto found = table->find(name);
  if (found == table->end()) throw Error("aten::" + name + " does not exist");
  return found->second;
}

c10::OperatorHandle choose(const char* name, const std::vector<Value>& values) {
  const c10::OperatorHandle* best = nullptr;
  int best_score = 0;
  for (const c10::OperatorHandle& handle : overloads_of(name)) {
    int score = fit(handle.schema(), values);
    if (score > best_score) {
      best_score = score;
      best = &handle;
    }
  }
  if (best == nullptr) throw Error("no overload of aten::" + std::string(name) + " takes these arguments");
  return *best;
}

}  // namespace

std::vector<Tensor> call_all(const char* name, const std::vector<Value>& values) {
  c10::OperatorHandle handle = choose(name, values);
  const auto& arguments = handle.schema().arguments();
  torch::jit::Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(i < values.size() ? convert(values[i], *arguments[i].real_type()) : *arguments[i].default_value());
  }
  try {
    PlainDispatch dispatch;
    handle.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
  std::vector<Tensor> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      results.push_back(wrap(value.toTensor()));
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(wrap(tensor));
    } else if (value.isBool()) {
      results.push_back(full({}, value.toBool(), kBool));
    }
  }
  return results;
}

Tensor view_of(void* data, const Ints& shape, const Ints& strides, Type type) {
  PlainDispatch dispatch;
  return wrap(at::from_blob(data, shape, strides, at::TensorOptions().dtype(aten(type))));
}

Tensor view_of(void* data, const Ints& shape, Type type) {
  PlainDispatch dispatch;
  return wrap(at::from_blob(data, shape, at::TensorOptions().dtype(aten(type))));
}

int64_t bytes_of(Type type) { return static_cast<int64_t>(c10::elementSize(aten(type))); }
const char* name_of(Type type) { return c10::toString(aten(type)); }

Ints Tensor::sizes() const { return aten(*this).sizes().vec(); }
Ints Tensor::strides() const { return aten(*this).strides().vec(); }
int64_t Tensor::dim() const { return aten(*this).dim(); }
int64_t Tensor::numel() const { return aten(*this).numel(); }
Type Tensor::type() const { return static_cast<Type>(aten(*this).scalar_type()); }
int64_t Tensor::element_size() const { return static_cast<int64_t>(aten(*this).element_size()); }
bool Tensor::is_contiguous() const { return aten(*this).is_contiguous(); }
void* Tensor::data() const { return const_cast<void*>(aten(*this).const_data_ptr()); }

int64_t Tensor::size(int64_t at) const {
  int64_t n = dim();
  if (at < -n || at >= n) throw Error("dimension " + std::to_string(at) + " of a tensor with " + std::to_string(n));
  return aten(*this).size(at);
}

double Tensor::item() const {
  if (numel() != 1) throw Error("item() of a tensor with " + std::to_string(numel()) + " elements");
  Tensor wide = op("to.dtype", *this, kDouble);
  return *static_cast<const double*>(wide.data());
}

}  // namespace cpu

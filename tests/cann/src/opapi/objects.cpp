// The objects of aclnn calls (tensors, scalars, lists) and the two phases of a call: prepare and launch.
#include "op.h"

struct aclOpExecutor {
  opapi::Run run;
  std::vector<std::pair<const void*, size_t>> ranges;
  uint64_t workspace_size = 0;
  bool is_repeatable = false;
};

namespace opapi {
namespace {

thread_local std::vector<std::pair<const void*, size_t>> touched;
thread_local uint64_t requested_workspace = 0;
thread_local bool has_float64 = false;

const std::map<int, cpu::Type>& type_table() {
  static const std::map<int, cpu::Type> table = {
      {ACL_FLOAT, cpu::kFloat},   {ACL_FLOAT16, cpu::kHalf},  {ACL_INT8, cpu::kChar},   {ACL_INT32, cpu::kInt},
      {ACL_UINT8, cpu::kByte},    {ACL_INT16, cpu::kShort},   {ACL_INT64, cpu::kLong},  {ACL_DOUBLE, cpu::kDouble},
      {ACL_BOOL, cpu::kBool},     {ACL_BF16, cpu::kBFloat16}, {ACL_UINT32, cpu::Type::uint32}, {ACL_UINT64, cpu::Type::uint64},
      {ACL_UINT16, cpu::Type::uint16}, {ACL_COMPLEX64, cpu::Type::complex64}};
  return table;
}

}  // namespace

cpu::Type scalar_type(int acl_type) {
  auto found = type_table().find(acl_type);
  if (found == type_table().end()) throw Refusal(kParamInvalid, text("data type ", acl_type, " is not emulated"));
  return found->second;
}

int acl_type(cpu::Type type) {
  for (const auto& [acl, scalar] : type_table()) {
    if (scalar == type) return acl;
  }
  return ACL_DT_UNDEFINED;
}

void touch(const Tensor& tensor) {
  has_float64 |= tensor.type() == cpu::kDouble;
  if (tensor.numel() == 0) return;
  int64_t last = 0;
  cpu::Ints sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t dim = 0; dim < sizes.size(); ++dim) last += (sizes[dim] - 1) * strides[dim];
  touched.emplace_back(tensor.data(), static_cast<size_t>((last + 1) * tensor.element_size()));
}

Input::Input(const aclTensor* given) : source(given) {
  if (given == nullptr) return;
  static_cast<Tensor&>(*this) = given->view;
  format = given->format;
  storage_shape = given->storage_shape;
  touch(*this);
}

// Stored as (..., blocks of columns, blocks of rows, 16, width).
Tensor Input::plain() const {
  if (!is_fractal()) return *this;
  cpu::Ints dims, shape = storage_shape;
  auto first = static_cast<int64_t>(shape.size()) - 4;
  for (int64_t dim = 0; dim < first; ++dim) dims.push_back(dim);
  for (int64_t dim : {1, 2, 0, 3}) dims.push_back(first + dim);
  Tensor turned = cpu::view_of(data(), shape, type()).permute(dims);
  cpu::Ints padded(shape.begin(), shape.begin() + first);
  padded.push_back(shape[first + 1] * shape[first + 2]);
  padded.push_back(shape[first] * shape[first + 3]);
  return turned.reshape(padded).narrow(-2, 0, size(-2)).narrow(-1, 0, size(-1));
}

void Output::write(const Tensor& result) const {
  if (result.sizes() != sizes()) {
    throw emu::DeviceError(kParamInvalid, text("the result has shape ", result.sizes(), ", the output ", sizes()));
  }
  copy_(result);
}

void Output::write_and_shrink(const Tensor& result) const {
  Tensor start = cpu::view_of(data(), result.sizes(), type());
  start.copy_(result);
  source->view = start;
}

const aclTensor* plain_only(const aclTensor* tensor, const char* name) {
  require(tensor == nullptr || tensor->format != ACL_FORMAT_FRACTAL_NZ, name, " lies in FRACTAL_NZ, which the operator does not take");
  return tensor;
}

std::vector<Input> inputs_in_any_layout(const aclTensorList* list, const char* name) {
  require_code(kParamNull, list != nullptr, name, " is null");
  return std::vector<Input>(list->tensors.begin(), list->tensors.end());
}

std::vector<Input> inputs_of(const aclTensorList* list, const char* name) {
  std::vector<Input> inputs = inputs_in_any_layout(list, name);
  for (const Input& input : inputs) plain_only(input.source, name);
  return inputs;
}

std::vector<Output> outputs_of(const aclTensorList* list, const char* name) {
  require_code(kParamNull, list != nullptr, name, " is null");
  return std::vector<Output>(list->tensors.begin(), list->tensors.end());
}

void falls_back(const char* group, const std::string& name_and_reason) { emu::count(group, name_and_reason); }

void request_workspace(uint64_t bytes) { requested_workspace = bytes; }

aclnnStatus prepare(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, const std::function<Run()>& plan) {
  if (int code = emu::injected_failure(name)) return code;
  if (workspace_size == nullptr || executor == nullptr) return emu::refuse(kParamNull, "%s: no place for the executor", name);
  touched.clear();
  requested_workspace = 0;
  has_float64 = false;
  try {
    Run run = plan();
    if (has_float64) falls_back("ai_cpu", std::string(name) + ": float64");
    *workspace_size = requested_workspace;
    *executor = new aclOpExecutor{std::move(run), std::move(touched), requested_workspace};
    touched.clear();
    return 0;
  } catch (const Refusal& refusal) {
    return emu::refuse(refusal.code, "%s: %s", name, refusal.what());
  } catch (const cpu::Error& error) {
    return emu::refuse(kParamInvalid, "%s: %s", name, error.what());
  }
}

aclnnStatus launch(const char* name, void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream) {
  if (executor == nullptr) return emu::refuse(kParamNull, "%s: no executor", name);
  if (executor->workspace_size > 0 && (workspace_size < executor->workspace_size || !emu::is_device_range(workspace, workspace_size))) {
    return emu::refuse(kRuntimeError, "%s: the workspace has %lu bytes, %lu were asked for", name, workspace_size, executor->workspace_size);
  }
  auto task = [run = executor->run, ranges = executor->ranges] {
    for (const auto& [address, bytes] : ranges) {
      device_check(emu::is_device_range(address, bytes), bytes, " bytes at ", address, " are not device memory");
    }
    run();
  };
  std::string kernel;
  if (emu::settings().loads_kernels) {
    // An operator in place has the kernel of the other one, and a view with gaps may that of one without.
    kernel = name;
    if (size_t at = kernel.find("Inplace"); at != std::string::npos) kernel.erase(at, 7);
    size_t rounded = 1;
    for (const auto& [address, bytes] : executor->ranges) {
      while (rounded < bytes) rounded *= 2;
    }
    kernel += " " + std::to_string(rounded);
  }
  if (!executor->is_repeatable) delete executor;
  return emu::submit(stream, name, std::move(task), emu::TaskKind::launch, kernel);
}

// ---- constraints

std::string describe(const Tensor& tensor) {
  return tensor.defined() ? text(tensor.type(), tensor.sizes()) : std::string("null");
}

void require_dtype(const Tensor& tensor, std::initializer_list<cpu::Type> allowed, const char* name) {
  for (cpu::Type type : allowed) {
    if (tensor.type() == type) return;
  }
  throw Refusal(kParamInvalid, text(name, " has dtype ", tensor.type(), ", which the operator does not take"));
}

void require_same_dtype(const Tensor& a, const Tensor& b, const char* names) {
  require(a.type() == b.type(), names, " differ in dtype: ", a.type(), " and ", b.type());
}

void require_same_shape(const Tensor& a, const Tensor& b, const char* names) {
  require(a.sizes() == b.sizes(), names, " differ in shape: ", a.sizes(), " and ", b.sizes());
}

void require_dim(const Tensor& tensor, int64_t dim, const char* name) {
  require(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, not ", dim);
}

void require_contiguous(const Tensor& tensor, const char* name) {
  require(tensor.is_contiguous(), name, " is not contiguous: shape ", tensor.sizes(), ", strides ", tensor.strides());
}

void require_fractal(const Input& tensor, int64_t width, const char* name) {
  constexpr int64_t kRows = 16;
  require(tensor.is_fractal(), name, " does not lie in FRACTAL_NZ");
  require(tensor.dim() >= 2 && tensor.is_contiguous(), name, " in FRACTAL_NZ is a view or turned: shape ", tensor.sizes(), ", strides ", tensor.strides());
  int64_t rows = tensor.size(-2), columns = tensor.size(-1);
  require(rows > 1 && columns > 1, name, " ", tensor.sizes(), ": no side is 1 in FRACTAL_NZ");
  cpu::Ints whole = tensor.sizes();
  whole.resize(whole.size() - 2);
  for (int64_t part : {(columns + width - 1) / width, (rows + kRows - 1) / kRows, kRows, width}) whole.push_back(part);
  require(whole == tensor.storage_shape, name, " ", tensor.sizes(), " lies as ", tensor.storage_shape, ", not as ", whole);
}

void device_check_index(const Tensor& index, int64_t low, int64_t high, const char* name) {
  if (index.numel() == 0) return;
  auto least = static_cast<int64_t>(cpu::op("min", index).item()), most = static_cast<int64_t>(cpu::op("max", index).item());
  device_check(least >= low && most < high, name, " holds ", least < low ? least : most, ", outside [", low, ", ", high, ")");
}

int64_t wrap_dim(int64_t dim, int64_t num_dims) {
  int64_t limit = std::max<int64_t>(num_dims, 1);
  require(dim >= -limit && dim < limit, "dimension ", dim, " of a tensor with ", num_dims);
  return dim < 0 ? dim + limit : dim;
}

cpu::Ints tail_of(const cpu::Ints& sizes, int64_t length) { return {sizes.end() - length, sizes.end()}; }

}  // namespace opapi

using opapi::scalar_type;

EMU_EXPORT aclTensor* aclCreateTensor(const int64_t* view_dims, uint64_t num_view_dims, int type, const int64_t* strides,
                                      int64_t offset, int format, const int64_t* storage_dims, uint64_t num_storage_dims,
                                      void* data) {
  cpu::Type dtype;
  try {
    dtype = scalar_type(type);
  } catch (const opapi::Refusal& refusal) {
    emu::refuse(refusal.code, "aclCreateTensor: %s", refusal.what());
    return nullptr;
  }
  char* start = static_cast<char*>(data) + offset * cpu::bytes_of(dtype);
  cpu::Tensor view = cpu::view_of(start, cpu::Ints(view_dims, view_dims + num_view_dims), cpu::Ints(strides, strides + num_view_dims), dtype);
  return new aclTensor{view, format, std::vector<int64_t>(storage_dims, storage_dims + num_storage_dims)};
}

EMU_EXPORT aclScalar* aclCreateScalar(void* value, int type) {
  switch (scalar_type(type)) {
    case cpu::kFloat: return new aclScalar{*static_cast<float*>(value)};
    case cpu::kDouble: return new aclScalar{*static_cast<double*>(value)};
    case cpu::kLong: return new aclScalar{*static_cast<int64_t*>(value)};
    case cpu::kInt: return new aclScalar{*static_cast<int32_t*>(value)};
    case cpu::kShort: return new aclScalar{*static_cast<int16_t*>(value)};
    case cpu::kChar: return new aclScalar{*static_cast<int8_t*>(value)};
    case cpu::kByte: return new aclScalar{*static_cast<uint8_t*>(value)};
    case cpu::kBool: return new aclScalar{*static_cast<bool*>(value)};
    case cpu::kHalf: return new aclScalar{cpu::view_of(value, {}, cpu::kHalf).item()};
    case cpu::kBFloat16: return new aclScalar{cpu::view_of(value, {}, cpu::kBFloat16).item()};
    default: emu::refuse(kParamInvalid, "aclCreateScalar: data type %d is not emulated", type); return nullptr;
  }
}

EMU_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{std::vector<int64_t>(values, values + size)};
}
EMU_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{std::vector<float>(values, values + size)};
}
EMU_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(values, values + size)};
}
EMU_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{std::vector<const aclTensor*>(tensors, tensors + size)};
}
EMU_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  return new aclScalarList{std::vector<const aclScalar*>(scalars, scalars + size)};
}

#define EMU_DESTROY(TYPE)                                      \
  EMU_EXPORT aclnnStatus aclDestroy##TYPE(const acl##TYPE* x) { \
    delete x;                                                  \
    return 0;                                                  \
  }
EMU_DESTROY(Tensor)
EMU_DESTROY(Scalar)
EMU_DESTROY(IntArray)
EMU_DESTROY(FloatArray)
EMU_DESTROY(BoolArray)

// A list owns its members, as in CANN.
EMU_EXPORT aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  if (list != nullptr) {
    for (const aclTensor* tensor : list->tensors) delete tensor;
  }
  delete list;
  return 0;
}
EMU_EXPORT aclnnStatus aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) {
    for (const aclScalar* scalar : list->scalars) delete scalar;
  }
  delete list;
  return 0;
}

EMU_EXPORT aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  executor->is_repeatable = true;
  return 0;
}
EMU_EXPORT aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return 0;
}

// The caller frees the array with delete[], as CANN documents.
EMU_EXPORT aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* num_dims) {
  if (tensor == nullptr || dims == nullptr || num_dims == nullptr) return emu::refuse(kParamNull, "aclGetViewShape");
  *num_dims = static_cast<uint64_t>(tensor->view.dim());
  *dims = new int64_t[*num_dims];
  cpu::Ints sizes = tensor->view.sizes();
  std::copy(sizes.begin(), sizes.end(), *dims);
  return 0;
}

// For the graph engine in Python: runs an operator at once, outside every stream, and answers an error code.
EMU_EXPORT aclnnStatus cann_emu_run_now(aclOpExecutor* executor) {
  std::unique_ptr<aclOpExecutor> owned(executor);
  try {
    for (const auto& [address, bytes] : owned->ranges) {
      opapi::device_check(emu::is_device_range(address, bytes), bytes, " bytes at ", address, " are not device memory");
    }
    owned->run();
    return 0;
  } catch (const emu::DeviceError& error) {
    return emu::refuse(error.code, "%s", error.what());
  } catch (const std::exception& error) {
    return emu::refuse(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "%s", error.what());
  }
}

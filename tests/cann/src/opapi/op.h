// How an operator of the emulated CANN is written:
//
//   ACLNN(Add, In(self), In(other), Num(alpha), Out(out)) {
//     return [=] { out.write(cpu::op("add", self, other, alpha)); };
//   }
//
// defines aclnnAddGetWorkspaceSize (which runs the body: constraints are checked here and refused with CANN's codes) and
// aclnnAdd (which hands the returned task to the stream). The kinds of parameter are listed below; their order is the C order.
#pragma once

#include <optional>
#include <sstream>

#include "../emulation.h"
#include "foreach.h"
#include "tensor.h"

using aclnnStatus = int;
struct aclOpExecutor;

constexpr int kParamNull = 161001;
constexpr int kParamInvalid = 161002;
constexpr int kRuntimeError = 361001;
constexpr int kInnerTilingError = 561002;

struct aclTensor {
  mutable cpu::Tensor view;  // over the memory the program gave; contiguity and strides as given
  int format;
  std::vector<int64_t> storage_shape;
};
struct aclScalar {
  cpu::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

namespace opapi {

using Run = std::function<void()>;
using cpu::Scalar;
using cpu::Tensor;
using cpu::operator<<;

// A call that CANN would refuse before launching.
struct Refusal : std::runtime_error {
  Refusal(int error_code, const std::string& text) : std::runtime_error(text), code(error_code) {}
  int code;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw Refusal(kParamInvalid, text(parts...));
}

template <class... Parts>
void require_code(int code, bool holds, const Parts&... parts) {
  if (!holds) throw Refusal(code, text(parts...));
}

// A fault that only the running kernel sees, such as an index out of range.
template <class... Parts>
void device_check(bool holds, const Parts&... parts) {
  if (!holds) throw emu::DeviceError(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, text(parts...));
}

// Remembers the memory an operator's tensors occupy, so that the launch can check it is still device memory.
void touch(const Tensor& tensor);

struct Input : Tensor {
  Input() = default;
  explicit Input(const aclTensor* given);
  int format = ACL_FORMAT_ND;
  std::vector<int64_t> storage_shape;
  const aclTensor* source = nullptr;
  bool is_given() const { return defined(); }
  bool is_fractal() const { return format == ACL_FORMAT_FRACTAL_NZ; }
  // The matrices of one that lies in FRACTAL_NZ: a copy. Others as they are.
  Tensor plain() const;
};

struct Output : Input {
  using Input::Input;
  // Stores the result with the dtype of the output; a result of another shape is an error of the call.
  void write(const Tensor& result) const;
  // For outputs whose shape only the kernel knows: stores the result at the start, and aclGetViewShape answers its shape.
  void write_and_shrink(const Tensor& result) const;
};

// FRACTAL_NZ is for the parameters that say so (InAnyLayout, InsFractal): to others its bytes mean other numbers.
const aclTensor* plain_only(const aclTensor* tensor, const char* name);
inline Input mandatory_in_any_layout(const aclTensor* tensor, const char* name) {
  if (tensor == nullptr) throw Refusal(kParamNull, text(name, " is null"));
  return Input(tensor);
}
inline Input mandatory(const aclTensor* tensor, const char* name) { return mandatory_in_any_layout(plain_only(tensor, name), name); }
inline Output mandatory_output(const aclTensor* tensor, const char* name) {
  if (tensor == nullptr) throw Refusal(kParamNull, text(name, " is null"));
  return Output(plain_only(tensor, name));
}
inline Scalar mandatory_scalar(const aclScalar* scalar, const char* name) {
  if (scalar == nullptr) throw Refusal(kParamNull, text(name, " is null"));
  return scalar->value;
}
inline std::optional<Scalar> optional_scalar(const aclScalar* scalar) {
  return scalar == nullptr ? std::nullopt : std::optional<Scalar>(scalar->value);
}
inline std::vector<int64_t> mandatory_ints(const aclIntArray* array, const char* name) {
  if (array == nullptr) throw Refusal(kParamNull, text(name, " is null"));
  return array->values;
}
inline std::optional<std::vector<int64_t>> optional_ints(const aclIntArray* array) {
  return array == nullptr ? std::nullopt : std::optional<std::vector<int64_t>>(array->values);
}
std::vector<Input> inputs_of(const aclTensorList* list, const char* name);
std::vector<Input> inputs_in_any_layout(const aclTensorList* list, const char* name);
inline std::vector<Input> optional_inputs_of(const aclTensorList* list, const char* name) {
  return list == nullptr ? std::vector<Input>() : inputs_of(list, name);
}
std::vector<Output> outputs_of(const aclTensorList* list, const char* name);
cpu::Type scalar_type(int acl_type);
int acl_type(cpu::Type type);

// Counts a call that runs on the device's AI CPU, or sorts first, for this reason (README.md lists them); results are the same.
void falls_back(const char* group, const std::string& name_and_reason);

// Asks for device memory that the launch gets; called by a plan.
void request_workspace(uint64_t bytes);
aclnnStatus prepare(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, const std::function<Run()>& plan);
aclnnStatus launch(const char* name, void* workspace, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream);

// Constraint helpers; `name` is what the documentation calls the argument.
std::string describe(const Tensor& tensor);
void require_dtype(const Tensor& tensor, std::initializer_list<cpu::Type> allowed, const char* name);
void require_same_dtype(const Tensor& a, const Tensor& b, const char* names);
void require_same_shape(const Tensor& a, const Tensor& b, const char* names);
void require_dim(const Tensor& tensor, int64_t dim, const char* name);
void require_contiguous(const Tensor& tensor, const char* name);
// In FRACTAL_NZ, whole and not turned, in blocks of 16 rows and `width` columns, no matrix with a side of 1.
void require_fractal(const Input& tensor, int64_t width, const char* name);
void device_check_index(const Tensor& index, int64_t low, int64_t high, const char* name);
int64_t wrap_dim(int64_t dim, int64_t num_dims);
cpu::Ints tail_of(const cpu::Ints& sizes, int64_t length);

}  // namespace opapi

// ---- kinds of parameter: C type, value type, conversion
#define EMU_C_In(x) const aclTensor* x
#define EMU_V_In(x) [[maybe_unused]] const opapi::Input& x
#define EMU_A_In(x) opapi::mandatory(x, #x)
#define EMU_C_InAnyLayout(x) const aclTensor* x
#define EMU_V_InAnyLayout(x) [[maybe_unused]] const opapi::Input& x
#define EMU_A_InAnyLayout(x) opapi::mandatory_in_any_layout(x, #x)
#define EMU_C_Opt(x) const aclTensor* x
#define EMU_V_Opt(x) [[maybe_unused]] const opapi::Input& x
#define EMU_A_Opt(x) opapi::Input(opapi::plain_only(x, #x))
#define EMU_C_Out(x) const aclTensor* x
#define EMU_V_Out(x) [[maybe_unused]] const opapi::Output& x
#define EMU_A_Out(x) opapi::mandatory_output(x, #x)
#define EMU_C_OptOut(x) const aclTensor* x
#define EMU_V_OptOut(x) [[maybe_unused]] const opapi::Output& x
#define EMU_A_OptOut(x) opapi::Output(opapi::plain_only(x, #x))
#define EMU_C_Ins(x) const aclTensorList* x
#define EMU_V_Ins(x) [[maybe_unused]] const std::vector<opapi::Input>& x
#define EMU_A_Ins(x) opapi::inputs_of(x, #x)
#define EMU_C_InsFractal(x) const aclTensorList* x
#define EMU_V_InsFractal(x) [[maybe_unused]] const std::vector<opapi::Input>& x
#define EMU_A_InsFractal(x) opapi::inputs_in_any_layout(x, #x)
#define EMU_C_OptIns(x) const aclTensorList* x
#define EMU_V_OptIns(x) [[maybe_unused]] const std::vector<opapi::Input>& x
#define EMU_A_OptIns(x) opapi::optional_inputs_of(x, #x)
#define EMU_C_Outs(x) const aclTensorList* x
#define EMU_V_Outs(x) [[maybe_unused]] const std::vector<opapi::Output>& x
#define EMU_A_Outs(x) opapi::outputs_of(x, #x)
#define EMU_C_Num(x) const aclScalar* x
#define EMU_V_Num(x) [[maybe_unused]] const cpu::Scalar& x
#define EMU_A_Num(x) opapi::mandatory_scalar(x, #x)
#define EMU_C_OptNum(x) const aclScalar* x
#define EMU_V_OptNum(x) [[maybe_unused]] const std::optional<cpu::Scalar>& x
#define EMU_A_OptNum(x) opapi::optional_scalar(x)
#define EMU_C_Ints(x) const aclIntArray* x
#define EMU_V_Ints(x) [[maybe_unused]] const std::vector<int64_t>& x
#define EMU_A_Ints(x) opapi::mandatory_ints(x, #x)
#define EMU_C_OptInts(x) const aclIntArray* x
#define EMU_V_OptInts(x) [[maybe_unused]] const std::optional<std::vector<int64_t>>& x
#define EMU_A_OptInts(x) opapi::optional_ints(x)
#define EMU_C_Int(x) int64_t x
#define EMU_V_Int(x) [[maybe_unused]] int64_t x
#define EMU_A_Int(x) x
#define EMU_C_Unsigned(x) uint64_t x
#define EMU_V_Unsigned(x) [[maybe_unused]] uint64_t x
#define EMU_A_Unsigned(x) x
#define EMU_C_Small(x) int8_t x
#define EMU_V_Small(x) [[maybe_unused]] int8_t x
#define EMU_A_Small(x) x
#define EMU_C_Flag(x) bool x
#define EMU_V_Flag(x) [[maybe_unused]] bool x
#define EMU_A_Flag(x) x
#define EMU_C_Double(x) double x
#define EMU_V_Double(x) [[maybe_unused]] double x
#define EMU_A_Double(x) x
#define EMU_C_Float(x) float x
#define EMU_V_Float(x) [[maybe_unused]] float x
#define EMU_A_Float(x) x
#define EMU_C_Type(x) int x
#define EMU_V_Type(x) [[maybe_unused]] cpu::Type x
#define EMU_A_Type(x) opapi::scalar_type(x)
#define EMU_C_Text(x) const char* x
#define EMU_V_Text(x) [[maybe_unused]] const std::string& x
#define EMU_A_Text(x) std::string(x == nullptr ? "" : x)

#define EMU_C(parameter) EMU_C_##parameter
#define EMU_V(parameter) EMU_V_##parameter
#define EMU_A(parameter) EMU_A_##parameter

#define ACLNN(NAME, ...)                                                                                                \
  static opapi::Run plan_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__));                                                      \
  EMU_EXPORT aclnnStatus aclnn##NAME##GetWorkspaceSize(EMU_FOR_EACH(EMU_C, __VA_ARGS__), uint64_t* emu_workspace,       \
                                                       aclOpExecutor** emu_executor) {                                  \
    return opapi::prepare("aclnn" #NAME, emu_workspace, emu_executor,                                                   \
                          [&] { return plan_##NAME(EMU_FOR_EACH(EMU_A, __VA_ARGS__)); });                               \
  }                                                                                                                     \
  EMU_EXPORT aclnnStatus aclnn##NAME(void* emu_memory, uint64_t emu_size, aclOpExecutor* emu_executor,                   \
                                     aclrtStream emu_stream) {                                                          \
    return opapi::launch("aclnn" #NAME, emu_memory, emu_size, emu_executor, emu_stream);                                \
  }                                                                                                                     \
  static opapi::Run plan_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__))

// The same for a function that CANN has from a version on (900 for 9.0.0). Before it dlsym finds neither symbol: the address of
// an ifunc is what its resolver returns when it is looked up, and here that is null.
#define ACLNN_SINCE(VERSION, NAME, ...)                                                                                \
  static opapi::Run plan_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__));                                                      \
  static aclnnStatus size_##NAME(EMU_FOR_EACH(EMU_C, __VA_ARGS__), uint64_t* emu_workspace, aclOpExecutor** emu_executor) { \
    return opapi::prepare("aclnn" #NAME, emu_workspace, emu_executor,                                                   \
                          [&] { return plan_##NAME(EMU_FOR_EACH(EMU_A, __VA_ARGS__)); });                               \
  }                                                                                                                     \
  static aclnnStatus launch_##NAME(void* emu_memory, uint64_t emu_size, aclOpExecutor* emu_executor, aclrtStream emu_stream) { \
    return opapi::launch("aclnn" #NAME, emu_memory, emu_size, emu_executor, emu_stream);                                \
  }                                                                                                                     \
  extern "C" {                                                                                                          \
  static decltype(&size_##NAME) find_size_##NAME() {                                                                    \
    return emu::settings().cann_version < VERSION ? nullptr : &size_##NAME;                                             \
  }                                                                                                                     \
  static decltype(&launch_##NAME) find_launch_##NAME() {                                                                \
    return emu::settings().cann_version < VERSION ? nullptr : &launch_##NAME;                                           \
  }                                                                                                                     \
  }                                                                                                                     \
  EMU_EXPORT aclnnStatus aclnn##NAME##GetWorkspaceSize(EMU_FOR_EACH(EMU_C, __VA_ARGS__), uint64_t* emu_workspace,       \
                                                       aclOpExecutor** emu_executor)                                    \
      __attribute__((ifunc("find_size_" #NAME)));                                                                       \
  EMU_EXPORT aclnnStatus aclnn##NAME(void* emu_memory, uint64_t emu_size, aclOpExecutor* emu_executor,                   \
                                     aclrtStream emu_stream) __attribute__((ifunc("find_launch_" #NAME)));               \
  static opapi::Run plan_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__))

// Defines aclnn<NAME>GetMaxWorkspaceSize, which only asks for memory and launches nothing.
#define ACLNN_MAX_WORKSPACE(NAME, ...)                                                                                  \
  static opapi::Run max_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__));                                                       \
  EMU_EXPORT aclnnStatus aclnn##NAME##GetMaxWorkspaceSize(EMU_FOR_EACH(EMU_C, __VA_ARGS__), uint64_t* emu_workspace,    \
                                                          aclOpExecutor** emu_executor) {                               \
    return opapi::prepare("aclnn" #NAME "GetMaxWorkspaceSize", emu_workspace, emu_executor,                             \
                          [&] { return max_##NAME(EMU_FOR_EACH(EMU_A, __VA_ARGS__)); });                                \
  }                                                                                                                     \
  static opapi::Run max_##NAME(EMU_FOR_EACH(EMU_V, __VA_ARGS__))

// A small tensor over ATen's CPU kernels. Every function goes through ATen's dispatcher by name, so an operator file needs
// none of ATen's headers and compiles in a second instead of half a minute. Only bridge.cpp knows ATen.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace cpu {

// ATen's own numbers for element types.
enum class Type : int8_t { byte = 0, int8 = 1, int16 = 2, int32 = 3, int64 = 4, half = 5, float32 = 6, float64 = 7, complex64 = 9, boolean = 11, bfloat16 = 15, uint16 = 27, uint32 = 28, uint64 = 29 };
constexpr Type kByte = Type::byte, kChar = Type::int8, kShort = Type::int16, kInt = Type::int32, kLong = Type::int64, kHalf = Type::half,
               kFloat = Type::float32, kDouble = Type::float64, kBool = Type::boolean, kBFloat16 = Type::bfloat16;
const char* name_of(Type type);
std::ostream& operator<<(std::ostream& out, Type type);

using Ints = std::vector<int64_t>;
std::ostream& operator<<(std::ostream& out, const Ints& values);

// A number that remembers whether it is whole, true or false, or real.
class Scalar {
 public:
  Scalar(bool value) : value_(value) {}
  Scalar(int value) : value_(static_cast<int64_t>(value)) {}
  Scalar(int64_t value) : value_(value) {}
  Scalar(double value) : value_(value) {}
  Scalar(float value) : value_(static_cast<double>(value)) {}
  double to_double() const;
  int64_t to_long() const;
  const std::variant<bool, int64_t, double>& value() const { return value_; }

 private:
  std::variant<bool, int64_t, double> value_;
};

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Handle;  // an at::Tensor

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<const Handle> handle) : handle_(std::move(handle)) {}
  bool defined() const { return handle_ != nullptr; }
  const Handle& handle() const { return *handle_; }

  Ints sizes() const;
  Ints strides() const;
  int64_t dim() const;
  int64_t numel() const;
  int64_t size(int64_t dim) const;
  Type type() const;
  int64_t element_size() const;
  bool is_contiguous() const;
  void* data() const;
  double item() const;
  bool truth() const { return item() != 0; }

  // Views and copies under ATen's names.
  Tensor operator[](int64_t index) const { return select(0, index); }
  Tensor to(Type type) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  Tensor slice(int64_t dim, int64_t start, int64_t end, int64_t step) const;
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor permute(const Ints& dims) const;
  Tensor reshape(const Ints& shape) const;
  Tensor flatten(int64_t first = 0, int64_t last = -1) const;
  Tensor unflatten(int64_t dim, const Ints& shape) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor squeeze(int64_t dim) const;
  Tensor expand(const Ints& shape) const;
  Tensor repeat_interleave(int64_t repeats, int64_t dim) const;
  Tensor index_select(int64_t dim, const Tensor& index) const;
  Tensor gather(int64_t dim, const Tensor& index) const;
  Tensor masked_fill(const Tensor& mask, const Scalar& value) const;
  Tensor cumsum(int64_t dim) const;
  Tensor mean(int64_t dim, bool keep) const;
  Tensor clone() const;
  std::vector<Tensor> chunk(int64_t parts, int64_t dim) const;
  // Writes into the memory of this tensor.
  void copy_(const Tensor& source) const;
  void fill_(const Scalar& value) const;
  void index_put_(const std::vector<Tensor>& indices, const Tensor& values, bool accumulate = false) const;

 private:
  std::shared_ptr<const Handle> handle_;
};

// One argument of a call by name.
struct Value {
  std::variant<std::monostate, Tensor, bool, int64_t, double, Ints, std::vector<Tensor>, std::string, Type> value;
  Value() = default;
  Value(std::nullopt_t) {}
  Value(const Tensor& tensor) {
    if (tensor.defined()) value = tensor;
  }
  Value(bool flag) : value(flag) {}
  Value(int number) : value(static_cast<int64_t>(number)) {}
  Value(int64_t number) : value(number) {}
  Value(double number) : value(number) {}
  Value(float number) : value(static_cast<double>(number)) {}
  Value(const Scalar& scalar) {
    std::visit([this](auto number) { value = number; }, scalar.value());
  }
  Value(const Ints& ints) : value(ints) {}
  Value(const std::vector<Tensor>& tensors) : value(tensors) {}  // an undefined tensor in the list stands for none
  Value(const char* text) : value(std::string(text)) {}
  Value(const std::string& text) : value(text) {}
  Value(Type type) : value(type) {}
  template <class T>
  Value(const std::optional<T>& maybe) {
    if (maybe.has_value()) *this = Value(*maybe);
  }
};

// Calls aten::<name>; the overload is the one whose parameters take these arguments in order, the rest take their defaults.
// `name` may name the overload: "add.Tensor".
std::vector<Tensor> call_all(const char* name, const std::vector<Value>& arguments);
inline Tensor call(const char* name, const std::vector<Value>& arguments) { return call_all(name, arguments).front(); }
template <class... A>
Tensor op(const char* name, const A&... arguments) {
  return call(name, {Value(arguments)...});
}
template <class... A>
std::vector<Tensor> ops(const char* name, const A&... arguments) {
  return call_all(name, {Value(arguments)...});
}

// A tensor over memory that somebody else owns.
Tensor view_of(void* data, const Ints& shape, const Ints& strides, Type type);
Tensor view_of(void* data, const Ints& shape, Type type);
int64_t bytes_of(Type type);

Tensor empty(const Ints& shape, Type type);
Tensor full(const Ints& shape, const Scalar& value, Type type);
Tensor arange(int64_t end);

#define CPU_BINARY(SYMBOL, NAME)                                                                      \
  inline Tensor operator SYMBOL(const Tensor& a, const Tensor& b) { return op(NAME, a, b); }          \
  inline Tensor operator SYMBOL(const Tensor& a, const Scalar& b) { return op(NAME, a, b); }
CPU_BINARY(+, "add")
CPU_BINARY(-, "sub")
CPU_BINARY(*, "mul")
CPU_BINARY(/, "div")
CPU_BINARY(<, "lt")
CPU_BINARY(<=, "le")
CPU_BINARY(>, "gt")
CPU_BINARY(>=, "ge")
#undef CPU_BINARY
inline Tensor operator-(const Tensor& a) { return op("neg", a); }

}  // namespace cpu

// The methods of the small tensor, all of them calls by name.
#include "tensor.h"

namespace cpu {

std::ostream& operator<<(std::ostream& out, Type type) { return out << name_of(type); }

std::ostream& operator<<(std::ostream& out, const Ints& values) {
  out << "[";
  for (size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ", ") << values[i];
  return out << "]";
}

double Scalar::to_double() const {
  return std::visit([](auto number) { return static_cast<double>(number); }, value_);
}
int64_t Scalar::to_long() const {
  return std::visit([](auto number) { return static_cast<int64_t>(number); }, value_);
}

Tensor Tensor::to(Type wanted) const { return type() == wanted ? *this : op("to.dtype", *this, wanted); }
Tensor Tensor::select(int64_t dim, int64_t index) const { return op("select.int", *this, dim, index); }
Tensor Tensor::narrow(int64_t dim, int64_t start, int64_t length) const { return op("narrow", *this, dim, start, length); }
Tensor Tensor::slice(int64_t dim, int64_t start, int64_t end, int64_t step) const { return op("slice.Tensor", *this, dim, start, end, step); }
Tensor Tensor::transpose(int64_t a, int64_t b) const { return op("transpose.int", *this, a, b); }
Tensor Tensor::permute(const Ints& dims) const { return op("permute", *this, dims); }
Tensor Tensor::reshape(const Ints& shape) const { return op("reshape", *this, shape); }
Tensor Tensor::flatten(int64_t first, int64_t last) const { return op("flatten.using_ints", *this, first, last); }
Tensor Tensor::unflatten(int64_t dim, const Ints& shape) const { return op("unflatten.int", *this, dim, shape); }
Tensor Tensor::unsqueeze(int64_t dim) const { return op("unsqueeze", *this, dim); }
Tensor Tensor::squeeze(int64_t dim) const { return op("squeeze.dim", *this, dim); }
Tensor Tensor::expand(const Ints& shape) const { return op("expand", *this, shape); }
Tensor Tensor::repeat_interleave(int64_t repeats, int64_t dim) const { return op("repeat_interleave.self_int", *this, repeats, dim); }
Tensor Tensor::index_select(int64_t dim, const Tensor& index) const { return op("index_select", *this, dim, index); }
Tensor Tensor::gather(int64_t dim, const Tensor& index) const { return op("gather", *this, dim, index); }
Tensor Tensor::masked_fill(const Tensor& mask, const Scalar& value) const { return op("masked_fill.Scalar", *this, mask, value); }
Tensor Tensor::cumsum(int64_t dim) const { return op("cumsum", *this, dim); }
Tensor Tensor::mean(int64_t dim, bool keep) const { return op("mean.dim", *this, Ints{dim}, keep); }
Tensor Tensor::clone() const { return op("clone", *this); }
std::vector<Tensor> Tensor::chunk(int64_t parts, int64_t dim) const { return ops("chunk", *this, parts, dim); }

void Tensor::copy_(const Tensor& source) const { op("copy_", *this, source); }
void Tensor::fill_(const Scalar& value) const { op("fill_.Scalar", *this, value); }
void Tensor::index_put_(const std::vector<Tensor>& indices, const Tensor& values, bool accumulate) const {
  op("index_put_", *this, indices, values, accumulate);
}

Tensor empty(const Ints& shape, Type type) { return op("empty.memory_format", shape, type); }
Tensor full(const Ints& shape, const Scalar& value, Type type) { return op("full", shape, value, type); }
Tensor arange(int64_t end) { return op("arange", end, kLong); }

}  // namespace cpu

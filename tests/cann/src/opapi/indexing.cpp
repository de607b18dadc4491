// Operators that read or write by index. Indices out of range fault when the kernel runs, as on a device.
#include "op.h"

using opapi::device_check;
using opapi::device_check_index;
using opapi::require;
using opapi::require_dtype;

namespace {

void require_index(const cpu::Tensor& index, const char* name = "index") { require_dtype(index, {cpu::kInt, cpu::kLong}, name); }

// CANN marks a dimension that is not indexed with an empty tensor of shape [0], whatever its type.
bool is_absent(const opapi::Input& index) { return !index.is_given() || (index.dim() == 1 && index.size(0) == 0); }

std::vector<cpu::Tensor> index_list(const std::vector<opapi::Input>& indices) {
  std::vector<cpu::Tensor> list;
  for (const auto& index : indices) list.push_back(is_absent(index) ? cpu::Tensor() : static_cast<const cpu::Tensor&>(index));
  return list;
}

void require_indices(const cpu::Tensor& self, const std::vector<opapi::Input>& indices) {
  require(static_cast<int64_t>(indices.size()) <= self.dim(), indices.size(), " indices for ", self.dim(), " dimensions");
  for (const auto& index : indices) {
    if (!is_absent(index)) require_dtype(index, {cpu::kInt, cpu::kLong, cpu::kBool}, "indices");
  }
}

void check_indices(const cpu::Tensor& self, const std::vector<opapi::Input>& indices) {
  for (size_t dim = 0; dim < indices.size(); ++dim) {
    if (is_absent(indices[dim]) || indices[dim].type() == cpu::kBool) continue;
    int64_t size = self.size(static_cast<int64_t>(dim));
    device_check_index(indices[dim], -size, size, "indices");
  }
}

}  // namespace

ACLNN(Embedding, In(weight), In(indices), Out(out)) {
  opapi::require_dim(weight, 2, "weight");
  require_index(indices, "indices");
  opapi::require_same_dtype(weight, out, "weight and out");
  return [=] {
    device_check_index(indices, 0, weight.size(0), "indices");
    out.write(cpu::op("embedding", weight, indices));
  };
}
ACLNN(IndexSelect, In(self), Int(dim), In(index), Out(out)) {
  require_index(index);
  require(index.dim() <= 1, "index has ", index.dim(), " dimensions");
  return [=] {
    device_check_index(index, 0, self.size(dim), "index");
    out.write(cpu::op("index_select", self, dim, index.reshape({-1})));
  };
}
ACLNN(Index, In(self), Ins(indices), Out(out)) {
  require_indices(self, indices);
  return [=] {
    check_indices(self, indices);
    out.write(cpu::op("index", self, index_list(indices)));
  };
}
ACLNN(IndexPutImpl, Out(self), Ins(indices), In(values), Flag(accumulate), Flag(is_unsafe)) {
  require_indices(self, indices);
  opapi::require_same_dtype(self, values, "selfRef and values");
  return [=] {
    check_indices(self, indices);
    self.index_put_(index_list(indices), values, accumulate);
  };
}
// CANN's direct kernels gather along the last axis, and along another one only if it is long enough (aclnn_gather.cpp of
// ops-nn, IfUseGatherElementsV2 without its look at workspaces). Else the whole input is transposed.
namespace {
void note_transposed_gather(const cpu::Tensor& self, int64_t dim, const cpu::Tensor& index) {
  constexpr int64_t kShortest = 16, kLongestInside = 120000, kLeastOutside = 196608, kNarrowest = 32;
  if (self.dim() == 0 || opapi::wrap_dim(dim, self.dim()) == self.dim() - 1) return;
  int64_t axis = opapi::wrap_dim(dim, self.dim()), length = self.size(axis), behind = 1;
  for (int64_t i = axis + 1; i < self.dim(); ++i) behind *= self.size(i);
  int64_t bytes = length * self.element_size();
  bool has_length = bytes < kLongestInside ? index.size(axis) >= kShortest && length >= kShortest : bytes > kLeastOutside;
  auto type = self.type();
  bool has_type = type == cpu::kFloat || type == cpu::kHalf || type == cpu::kBFloat16 || type == cpu::kInt;
  if (!has_type || !has_length || behind <= kNarrowest) opapi::falls_back("transposed", "aclnnGather: not along the last axis");
}
}  // namespace
ACLNN(Gather, In(self), Int(dim), In(index), Out(out)) {
  require_index(index);
  note_transposed_gather(self, dim, index);
  return [=] {
    device_check_index(index, 0, self.dim() == 0 ? 1 : self.size(dim), "index");
    out.write(cpu::op("gather", self, dim, index.to(cpu::kLong)));
  };
}
ACLNN(Take, In(self), In(index), Out(out)) {
  require_index(index);
  return [=] {
    device_check_index(index, 0, self.numel(), "index");
    out.write(cpu::op("take", self, index.to(cpu::kLong)));
  };
}

// Writes along an axis: an axis of length 1 goes to the AI CPU, bfloat16 sorts its indices first.
namespace {
void note_write_along_axis(const char* name, const cpu::Tensor& self, int64_t dim) {
  if (self.dim() > 0 && self.size(dim) == 1) opapi::falls_back("ai_cpu", std::string(name) + ": axis of length 1");
  if (self.type() == cpu::kBFloat16) opapi::falls_back("sorted", std::string(name) + ": bfloat16");
}
}  // namespace

// Along any other axis than the first, the whole tensor is transposed, written and transposed back (aclnn_index_copy.cpp of ops-nn).
namespace {
void note_copy_along_axis(const char* name, const cpu::Tensor& self, int64_t dim) {
  note_write_along_axis(name, self, dim);
  if (self.dim() > 0 && opapi::wrap_dim(dim, self.dim()) != 0) {
    opapi::falls_back("rewritten", std::string(name) + ": not along the first axis");
  }
}
}  // namespace

// ---- writes: `reduction` is 0 store, 1 add, 2 multiply
namespace {
cpu::Tensor scattered(const cpu::Tensor& self, int64_t dim, const cpu::Tensor& index, const cpu::Tensor& source, int64_t reduction) {
  device_check_index(index, 0, self.dim() == 0 ? 1 : self.size(dim), "index");
  cpu::Tensor long_index = index.to(cpu::kLong);
  if (reduction == 0) return cpu::op("scatter.src", self, dim, long_index, source.to(self.type()));
  return cpu::op("scatter.reduce", self, dim, long_index, source.to(self.type()), std::string(reduction == 1 ? "add" : "multiply"));
}
cpu::Tensor scattered(const cpu::Tensor& self, int64_t dim, const cpu::Tensor& index, const cpu::Scalar& value, int64_t reduction) {
  return scattered(self, dim, index, cpu::full(index.sizes(), value, self.type()), reduction);
}
// CANN's kernel reads an axis in pieces that half a core's buffer holds, 50 at most; a flat table is one long axis. All else goes
// to the AI CPU, which copies the table out and back (scatter_elements.cpp of ops-nn, UseScatterElementsV2).
void note_scatter(const char* name, const cpu::Tensor& self, int64_t dim, int64_t reduction) {
  constexpr int64_t kBufferBytes = 192 * 1024 / 2, kMostPieces = 50;
  if (self.dim() == 0) return;
  int64_t axis = opapi::wrap_dim(dim, self.dim());
  auto type = self.type();
  bool is_half = type == cpu::kHalf || type == cpu::kBFloat16;  // summed in float32 beside the 16 bits
  bool has_type = is_half || type == cpu::kFloat || type == cpu::kInt || type == cpu::kChar || type == cpu::kByte;
  int64_t piece = kBufferBytes / (is_half ? 6 : self.element_size());
  std::string reason;
  if (!has_type) reason = "a type without a kernel";
  else if (reduction == 2) reason = "products";
  else if (axis != 0 && axis != self.dim() - 1) reason = "an axis in the middle";
  else if ((self.size(axis) + piece - 1) / piece > kMostPieces) reason = "an axis of more than 50 pieces";
  if (!reason.empty()) opapi::falls_back("ai_cpu", std::string(name) + ": " + reason);
}
void check_scatter(const char* name, const cpu::Tensor& self, int64_t dim, const cpu::Tensor& index, int64_t reduction) {
  require_index(index);
  require(reduction >= 0 && reduction <= 2, "reduction is ", reduction);
  note_scatter(name, self, dim, reduction);
}
}  // namespace
ACLNN(Scatter, In(self), Int(dim), In(index), In(source), Int(reduction), Out(out)) {
  check_scatter("aclnnScatter", self, dim, index, reduction);
  return [=] { out.write(scattered(self, dim, index, source, reduction)); };
}
ACLNN(ScatterValue, In(self), Int(dim), In(index), Num(value), Int(reduction), Out(out)) {
  check_scatter("aclnnScatterValue", self, dim, index, reduction);
  return [=] { out.write(scattered(self, dim, index, value, reduction)); };
}
ACLNN(InplaceScatter, Out(self), Int(dim), In(index), In(source), Int(reduction)) {
  check_scatter("aclnnInplaceScatter", self, dim, index, reduction);
  return [=] { self.write(scattered(self, dim, index, source, reduction)); };
}
ACLNN(InplaceScatterValue, Out(self), Int(dim), In(index), Num(value), Int(reduction)) {
  check_scatter("aclnnInplaceScatterValue", self, dim, index, reduction);
  return [=] { self.write(scattered(self, dim, index, value, reduction)); };
}
ACLNN(ScatterAdd, In(self), Int(dim), In(index), In(source), Out(out)) {
  check_scatter("aclnnScatterAdd", self, dim, index, 1);
  return [=] { out.write(scattered(self, dim, index, source, 1)); };
}
ACLNN(IndexAdd, In(self), Int(dim), In(index), In(source), Num(alpha), Out(out)) {
  require_index(index);
  note_write_along_axis("aclnnIndexAdd", self, dim);
  return [=] {
    device_check_index(index, 0, self.size(dim), "index");
    out.write(cpu::op("index_add", self, dim, index, source, alpha));
  };
}
ACLNN(IndexCopy, In(self), Int(dim), In(index), In(source), Out(out)) {
  require_index(index);
  note_copy_along_axis("aclnnIndexCopy", self, dim);
  return [=] {
    device_check_index(index, 0, self.size(dim), "index");
    out.write(cpu::op("index_copy", self, dim, index.to(cpu::kLong), source));
  };
}
ACLNN(InplaceIndexCopy, Out(self), Int(dim), In(index), In(source)) {
  require_index(index);
  note_copy_along_axis("aclnnInplaceIndexCopy", self, dim);
  return [=] {
    device_check_index(index, 0, self.size(dim), "index");
    cpu::op("index_copy_", self, dim, index.to(cpu::kLong), source);
  };
}
// CANN makes a whole new tensor and copies it back, however few rows are filled (aclnn_index_fill.cpp of ops-nn).
ACLNN(InplaceIndexFill, Out(self), Int(dim), In(index), Num(value)) {
  require_index(index);
  opapi::falls_back("rewritten", "aclnnInplaceIndexFill");
  return [=] {
    device_check_index(index, 0, self.size(dim), "index");
    cpu::op("index_fill_.int_Scalar", self, dim, index.to(cpu::kLong), value);
  };
}
// It writes in place, into a contiguous table. A table with gaps is copied out and back (aclnn_scatter_nd_update.cpp of ops-nn).
// Its numbers are right all the same, and so they are for indices and updates with gaps, which are copied first.
ACLNN(ScatterNdUpdate, Out(self), In(indices), In(updates)) {
  require_index(indices, "indices");
  opapi::require_same_dtype(self, updates, "varRef and updates");
  if (!self.is_contiguous()) opapi::falls_back("rewritten", "aclnnScatterNdUpdate: a table with gaps");
  return [=] {
    int64_t depth = indices.size(-1);
    std::vector<cpu::Tensor> list;
    for (int64_t i = 0; i < depth; ++i) {
      cpu::Tensor index = indices.select(-1, i).to(cpu::kLong);
      device_check_index(index, 0, self.size(i), "indices");
      list.push_back(index);
    }
    self.index_put_(list, updates);
  };
}
// Writes `updates` (one row of length updates.size(axis) for each batch) at the start position that `indices` gives.
ACLNN(InplaceScatterUpdate, Out(self), In(indices), In(updates), Int(axis)) {
  require_index(indices, "indices");
  opapi::require_same_dtype(self, updates, "data and updates");
  return [=] {
    int64_t dim = opapi::wrap_dim(axis, self.dim()), length = updates.size(dim);
    for (int64_t row = 0; row < indices.numel(); ++row) {
      auto start = static_cast<int64_t>(indices.reshape({-1})[row].item());
      device_check(start >= 0 && start + length <= self.size(dim), "indices holds ", start, ", axis has ", self.size(dim));
      self.select(0, row).narrow(dim - 1, start, length).copy_(updates.select(0, row));
    }
  };
}

// ---- masks
ACLNN(InplaceMaskedFillScalar, Out(self), In(mask), Num(value)) {
  require_dtype(mask, {cpu::kBool}, "mask");
  return [=] { cpu::op("masked_fill_.Scalar", self, mask, value); };
}
ACLNN(InplaceMaskedFillTensor, Out(self), In(mask), In(value)) {
  require_dtype(mask, {cpu::kBool}, "mask");
  return [=] { cpu::op("masked_fill_.Tensor", self, mask, value.reshape({})); };
}
ACLNN(InplaceMaskedScatter, Out(self), In(mask), In(source)) {
  require_dtype(mask, {cpu::kBool, cpu::kByte}, "mask");
  opapi::falls_back("ai_cpu", "aclnnInplaceMaskedScatter");
  return [=] { cpu::op("masked_scatter_", self, mask.to(cpu::kBool), source); };
}

// ---- results whose size depends on the values: the program has to wait for them
ACLNN(Nonzero, In(self), Out(out)) {
  opapi::require_dtype(out, {cpu::kLong}, "out");
  return [=] { out.write_and_shrink(cpu::op("nonzero", self)); };
}
ACLNN(MaskedSelect, In(self), In(mask), Out(out)) {
  require_dtype(mask, {cpu::kBool, cpu::kByte}, "mask");
  return [=] { out.write_and_shrink(cpu::op("masked_select", self, mask.to(cpu::kBool))); };
}

// Reductions, scans, sorting and softmax.
#include "op.h"

using opapi::require;

ACLNN(ReduceSum, In(self), Ints(dims), Flag(keep_dims), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("sum", self, dims, keep_dims, dtype)); };
}
ACLNN(Mean, In(self), Ints(dims), Flag(keep_dims), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("mean", self.to(dtype), dims, keep_dims)); };
}
ACLNN(Amax, In(self), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("amax", self, dims, keep_dims)); };
}
ACLNN(Amin, In(self), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("amin", self, dims, keep_dims)); };
}
ACLNN(Aminmax, In(self), Ints(dims), Flag(keep_dims), Out(least), Out(most)) {
  return [=] {
    least.write(cpu::op("amin", self, dims, keep_dims));
    most.write(cpu::op("amax", self, dims, keep_dims));
  };
}
ACLNN(Max, In(self), Out(out)) {
  require(self.numel() > 0, "self is empty");
  return [=] { out.write(cpu::op("max", self)); };
}
ACLNN(Min, In(self), Out(out)) {
  require(self.numel() > 0, "self is empty");
  return [=] { out.write(cpu::op("min", self)); };
}
ACLNN(MaxDim, In(self), Int(dim), Flag(keep_dim), Out(values), Out(indices)) {
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("max.dim", self, dim, keep_dim);
    values.write(both[0]);
    indices.write(both[1]);
  };
}
ACLNN(MinDim, In(self), Int(dim), Flag(keep_dim), Out(values), Out(indices)) {
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("min.dim", self, dim, keep_dim);
    values.write(both[0]);
    indices.write(both[1]);
  };
}
ACLNN(ArgMax, In(self), Int(dim), Flag(keep_dim), Out(out)) {
  opapi::require_dtype(out, {cpu::kInt, cpu::kLong}, "out");
  return [=] { out.write(cpu::op("argmax", self, dim, keep_dim)); };
}
ACLNN(ArgMin, In(self), Int(dim), Flag(keep_dim), Out(out)) {
  opapi::require_dtype(out, {cpu::kInt, cpu::kLong}, "out");
  return [=] { out.write(cpu::op("argmin", self, dim, keep_dim)); };
}
namespace {
cpu::Tensor all_or_any(cpu::Tensor flags, std::vector<int64_t> dims, bool keep_dims, bool is_all) {
  flags = flags.to(cpu::kBool);
  if (dims.empty()) {
    for (int64_t dim = 0; dim < flags.dim(); ++dim) dims.push_back(dim);
  }
  return is_all ? cpu::op("all.dims", flags, dims, keep_dims) : cpu::op("any.dims", flags, dims, keep_dims);
}
}  // namespace
ACLNN(All, In(self), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(all_or_any(self, dims, keep_dims, true)); };
}
ACLNN(Any, In(self), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(all_or_any(self, dims, keep_dims, false)); };
}
ACLNN(Equal, In(self), In(other), Out(out)) {
  opapi::require_dtype(out, {cpu::kBool}, "out");
  return [=] { out.fill_(self.sizes() == other.sizes() && cpu::op("equal", self, other).truth()); };
}
ACLNN(IsClose, In(self), In(other), Double(rtol), Double(atol), Flag(equal_nan), Out(out)) {
  return [=] { out.write(cpu::op("isclose", self, other, rtol, atol, equal_nan)); };
}
ACLNN(Prod, In(self), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("prod", self, dtype)); };
}
ACLNN(ProdDim, In(self), Int(dim), Flag(keep_dim), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("prod", self, dim, keep_dim, dtype)); };
}
ACLNN(VarCorrection, In(self), Ints(dims), Int(correction), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("var.correction", self, dims, correction, keep_dims)); };
}
ACLNN(Std, In(self), Ints(dims), Int(correction), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("std.correction", self, dims, correction, keep_dims)); };
}
ACLNN(VarMean, In(self), Ints(dims), Int(correction), Flag(keep_dims), Out(variance), Out(mean)) {
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("var_mean.correction", self, dims, correction, keep_dims);
    variance.write(both[0]);
    mean.write(both[1]);
  };
}
ACLNN(LinalgVectorNorm, In(self), Num(order), Ints(dims), Flag(keep_dims), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("linalg_vector_norm", self, order, dims, keep_dims, dtype)); };
}
ACLNN(Norm, In(self), Num(p), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("norm.ScalarOpt_dim", self, p, dims, keep_dims)); };
}
ACLNN(LogSumExp, In(self), Ints(dims), Flag(keep_dims), Out(out)) {
  return [=] { out.write(cpu::op("logsumexp", self, dims, keep_dims)); };
}
ACLNN(Cumsum, In(self), Int(dim), Type(dtype), Out(out)) {
  opapi::require_same_shape(self, out, "self and out");
  if (dtype != cpu::kFloat && dtype != cpu::kHalf && dtype != cpu::kBFloat16 && dtype != cpu::kInt) {
    opapi::falls_back("ai_cpu", "aclnnCumsum: integers other than int32");
  }
  return [=] { out.write(cpu::op("cumsum", self, dim, dtype)); };
}
ACLNN(Cumprod, In(self), Num(dim), Type(dtype), Out(out)) {
  return [=] { out.write(cpu::op("cumprod", self, dim.to_long(), dtype)); };
}
ACLNN(Bincount, In(self), Opt(weights), Int(min_length), Out(out)) {
  opapi::require_dim(self, 1, "self");
  return [=] {
    out.write(cpu::op("bincount", self, weights, min_length));
  };
}

// ---- order
ACLNN(Sort, In(self), Flag(is_stable), Int(dim), Flag(descending), Out(values), Out(indices)) {
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("sort.stable", self, true, dim, descending);
    values.write(both[0]);
    indices.write(both[1]);
  };
}
ACLNN(Topk, In(self), Int(k), Int(dim), Flag(largest), Flag(is_sorted), Out(values), Out(indices)) {
  require(self.dim() == 0 || (k >= 0 && k <= self.size(dim)), "k is ", k, ", the dimension has ", self.sizes());
  opapi::require_dtype(indices, {cpu::kLong}, "indices");
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("topk", self, k, dim, largest, true);
    values.write(both[0]);
    indices.write(both[1]);
  };
}
ACLNN(Kthvalue, In(self), Int(k), Int(dim), Flag(keep_dim), Out(values), Out(indices)) {
  return [=] {
    std::vector<cpu::Tensor> both = cpu::ops("kthvalue", self, k, dim, keep_dim);
    values.write(both[0]);
    indices.write(both[1]);
  };
}
ACLNN(SearchSorted, In(sorted), In(self), Flag(is_int32), Flag(right), Opt(sorter), Out(out)) {
  opapi::falls_back("ai_cpu", "aclnnSearchSorted");
  return [=] {
    out.write(cpu::op("searchsorted.Tensor", sorted, self, is_int32, right, std::nullopt, sorter));
  };
}

// ---- softmax; float16 and bfloat16 are computed in float32 inside
ACLNN(Softmax, In(self), Int(dim), Out(out)) {
  opapi::require_dtype(self, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16, cpu::kDouble}, "self");
  opapi::require_same_shape(self, out, "self and out");
  return [=] { out.write(cpu::op("softmax.int", self, dim, self.type() == cpu::kDouble ? cpu::kDouble : cpu::kFloat)); };
}
ACLNN(LogSoftmax, In(self), Int(dim), Out(out)) {
  opapi::require_dtype(self, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16, cpu::kDouble}, "self");
  opapi::require_same_shape(self, out, "self and out");
  return [=] { out.write(cpu::op("log_softmax.int", self, dim, self.type() == cpu::kDouble ? cpu::kDouble : cpu::kFloat)); };
}

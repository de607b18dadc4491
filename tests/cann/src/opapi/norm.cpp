// Normalisation and gated activation; everything is computed in float32 inside and rounded once at the end.
#include "op.h"

using cpu::Tensor;
using opapi::require;
using opapi::require_dtype;

namespace {

// gamma covers the last dimensions of x; rstd keeps those dimensions as 1. `mixes`: gamma may be float32 where x has 16 bits.
void check_rms_norm(const Tensor& x, const Tensor& gamma, const Tensor& y, const Tensor& rstd, bool mixes) {
  require_dtype(x, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "x");
  opapi::require_same_dtype(x, y, "x and y");
  opapi::require_same_shape(x, y, "x and y");
  require_dtype(rstd, {cpu::kFloat}, "rstd");
  if (!mixes || gamma.type() != cpu::kFloat) opapi::require_same_dtype(x, gamma, "x and gamma");
  require(x.dim() >= 2 && x.dim() <= 8 && gamma.dim() >= 1 && gamma.dim() <= x.dim(), "x ", x.sizes(), ", gamma ", gamma.sizes());
  require(opapi::tail_of(x.sizes(), gamma.dim()) == gamma.sizes(), "gamma ", gamma.sizes(), " is not the tail of x ", x.sizes());
}

std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  std::vector<int64_t> dims;
  for (int64_t dim = x.dim() - gamma.dim(); dim < x.dim(); ++dim) dims.push_back(dim);
  Tensor wide = x.to(cpu::kFloat);
  Tensor rstd = cpu::op("rsqrt", cpu::op("mean", wide * wide, dims, true) + cpu::Scalar(epsilon));
  return {wide * rstd * gamma.to(cpu::kFloat), rstd};
}

}  // namespace

ACLNN(RmsNorm, In(x), In(gamma), Double(epsilon), Out(y), Out(rstd)) {
  check_rms_norm(x, gamma, y, rstd, true);
  return [=] {
    auto [normed, inverse] = rms_norm(x, gamma, epsilon);
    y.write(normed);
    rstd.write(inverse.reshape(rstd.sizes()));
  };
}

namespace {
opapi::Run add_rms_norm(const opapi::Input& x1, const opapi::Input& x2, const opapi::Input& gamma, double epsilon,
                        const opapi::Output& y, const opapi::Output& rstd, const opapi::Output& x) {
  check_rms_norm(x1, gamma, y, rstd, false);
  opapi::require_same_dtype(x1, x2, "x1 and x2");
  opapi::require_same_shape(x1, x2, "x1 and x2");
  return [=] {
    Tensor sum = (x1.to(cpu::kFloat) + x2.to(cpu::kFloat)).to(x1.type());
    auto [normed, inverse] = rms_norm(sum, gamma, epsilon);
    y.write(normed);
    x.write(sum);
    rstd.write(inverse.reshape(rstd.sizes()));
  };
}
}  // namespace

ACLNN(AddRmsNorm, In(x1), In(x2), In(gamma), Double(epsilon), Out(y), Out(rstd), Out(x)) {
  return add_rms_norm(x1, x2, gamma, epsilon, y, rstd, x);
}
// The normalised value replaces x1, the sum replaces x2.
ACLNN(InplaceAddRmsNorm, Out(x1), Out(x2), In(gamma), Double(epsilon), Out(rstd)) {
  return add_rms_norm(x1, x2, gamma, epsilon, x1, rstd, x2);
}

ACLNN(LayerNorm, In(input), Ints(normalized_shape), Opt(weight), Opt(bias), Double(eps), Out(out), OptOut(mean), OptOut(rstd)) {
  require_dtype(input, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "input");
  int64_t tail = static_cast<int64_t>(normalized_shape.size());
  require(tail >= 1 && tail <= input.dim() && opapi::tail_of(input.sizes(), tail) == normalized_shape,
          "normalizedShape ", normalized_shape, ", input ", input.sizes());
  return [=] {
    Tensor scale, shift;
    if (weight.is_given()) scale = weight.to(cpu::kFloat);
    if (bias.is_given()) shift = bias.to(cpu::kFloat);
    std::vector<Tensor> all = cpu::ops("native_layer_norm", input.to(cpu::kFloat), normalized_shape, scale, shift, eps);
    out.write(all[0]);
    if (mean.is_given()) mean.write(all[1].reshape(mean.sizes()));
    if (rstd.is_given()) rstd.write(all[2].reshape(rstd.sizes()));
  };
}

ACLNN(SwiGlu, In(x), Int(dim), Out(out)) {
  require_dtype(x, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "x");
  opapi::require_same_dtype(x, out, "x and out");
  require(x.dim() >= 1 && x.dim() <= 8, "x has ", x.dim(), " dimensions");
  int64_t at = opapi::wrap_dim(dim, x.dim());
  require(x.size(at) % 2 == 0, "dimension ", dim, " of x is odd: ", x.sizes());
  require(out.dim() == x.dim() && out.size(at) * 2 == x.size(at), "x ", x.sizes(), ", out ", out.sizes());
  return [=] {
    std::vector<Tensor> halves = x.to(cpu::kFloat).chunk(2, at);
    out.write(cpu::op("silu", halves[0]) * halves[1]);
  };
}

// Norms of a sum that are rounded to int8 by one scale. By the operator's source: bfloat16 is widened and stays float32 until it is
// rounded, the sum too; float16 is rounded behind the sum, the norm and the weight. D features of a row.
#include "op.h"

using cpu::Tensor;
using opapi::require;
using opapi::require_dtype;

namespace {

bool is_there(const opapi::Input& input) { return input.is_given() && input.numel() > 0; }

// A2 and A3: scales of the weight's shape; with float16 they are float32 and zero points int32, with bfloat16 all are of it.
void check_scales(const Tensor& x, const Tensor& gamma, const Tensor& scales, const opapi::Input& zeros) {
  bool is_half = x.type() == cpu::kHalf;
  require_dtype(scales, {is_half ? cpu::kFloat : cpu::kBFloat16}, "scales1");
  opapi::require_same_shape(gamma, scales, "gamma and scales1");
  if (!is_there(zeros)) return;
  require_dtype(zeros, {is_half ? cpu::kInt : cpu::kBFloat16}, "zeroPoints1");
  require(zeros.sizes() == gamma.sizes(), "zeroPoints1 ", zeros.sizes(), ", gamma ", gamma.sizes());
}

}  // namespace

ACLNN(AddRmsNormQuantV2, In(x1), In(x2), In(gamma), In(scales1), Opt(scales2), Opt(zero_points1), Opt(zero_points2), Opt(beta), Int(axis),
      Double(epsilon), Flag(div_mode), Out(y1), OptOut(y2), Out(x), OptOut(norm)) {
  require_dtype(x1, {cpu::kHalf, cpu::kBFloat16}, "x1");
  opapi::require_same_dtype(x1, x2, "x1 and x2");
  opapi::require_same_shape(x1, x2, "x1 and x2");
  opapi::require_same_dtype(x1, gamma, "x1 and gamma");
  opapi::require_same_dtype(x1, x, "x1 and x");
  require_dtype(y1, {cpu::kChar}, "y1");
  require(gamma.sizes() == cpu::Ints{x1.size(-1)}, "gamma ", gamma.sizes(), ", x1 ", x1.sizes());
  require(x1.size(-1) % 16 == 0, "rows of ", x1.size(-1), " elements are no multiple of 32 bytes");
  require(div_mode && axis == -1, "divMode ", div_mode, ", axis ", axis, ": this chip divides, along the last axis");
  require(!is_there(scales2) && !is_there(zero_points2) && !is_there(beta) && !norm.is_given(),
          "scales2, zeroPoints2, beta and rmsNormOut are not emulated");
  check_scales(x1, gamma, scales1, zero_points1);
  return [=] {
    Tensor sum = x1.to(cpu::kFloat) + x2.to(cpu::kFloat), total = sum.to(x1.type());
    bool is_half = x1.type() == cpu::kHalf;
    Tensor wide = is_half ? total.to(cpu::kFloat) : sum;
    Tensor rstd = cpu::op("rsqrt", cpu::op("mean", wide * wide, cpu::Ints{-1}, true) + cpu::Scalar(epsilon));
    Tensor normed = wide * rstd;
    if (is_half) normed = normed.to(cpu::kHalf).to(cpu::kFloat);
    normed = normed * gamma.to(cpu::kFloat);
    if (is_half) normed = normed.to(cpu::kHalf).to(cpu::kFloat);
    normed = normed / scales1.to(cpu::kFloat);
    if (is_there(zero_points1)) normed = normed + zero_points1.to(cpu::kFloat);
    y1.write(cpu::op("clamp", cpu::op("round", normed), -128, 127).to(cpu::kChar));
    x.write(total);
  };
}

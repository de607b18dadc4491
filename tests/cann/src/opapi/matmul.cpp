// Matrix products and convolution. float16 and bfloat16 accumulate in float32 inside ATen's kernels.
#include "op.h"

using cpu::Tensor;
using opapi::require;

namespace {

void check_product(const Tensor& self, const Tensor& other, const Tensor& out, int8_t cube_math_type) {
  opapi::require_dtype(self, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "self");
  opapi::require_same_dtype(self, other, "self and mat2");
  require(cube_math_type >= 0 && cube_math_type <= 4, "cubeMathType is ", static_cast<int>(cube_math_type));
  require(self.dim() >= 1 && other.dim() >= 1 && out.dim() <= 6, "self ", self.sizes(), ", mat2 ", other.sizes());
  int64_t inner = other.dim() == 1 ? other.size(0) : other.size(-2);
  require(self.size(-1) == inner, "self ", self.sizes(), " times mat2 ", other.sizes());
}

Tensor scaled_sum(const Tensor& bias, const cpu::Scalar& beta, const Tensor& product, const cpu::Scalar& alpha) {
  Tensor sum = product.to(cpu::kFloat) * alpha;
  return beta.to_double() == 0 ? sum : sum + bias.to(cpu::kFloat) * beta;
}

}  // namespace

ACLNN(Matmul, In(self), In(mat2), Out(out), Small(cube_math_type)) {
  check_product(self, mat2, out, cube_math_type);
  return [=] { out.write(cpu::op("matmul", self, mat2)); };
}
ACLNN(Mm, In(self), In(mat2), Out(out), Small(cube_math_type)) {
  check_product(self, mat2, out, cube_math_type);
  opapi::require_dim(self, 2, "self");
  opapi::require_dim(mat2, 2, "mat2");
  return [=] { out.write(cpu::op("mm", self, mat2)); };
}
ACLNN(BatchMatMul, In(self), In(mat2), Out(out), Small(cube_math_type)) {
  check_product(self, mat2, out, cube_math_type);
  opapi::require_dim(self, 3, "self");
  opapi::require_dim(mat2, 3, "mat2");
  return [=] { out.write(cpu::op("bmm", self, mat2)); };
}
ACLNN(Mv, In(self), In(vec), Out(out), Small(cube_math_type)) {
  check_product(self, vec, out, cube_math_type);
  return [=] { out.write(cpu::op("mv", self, vec)); };
}
ACLNN(Dot, In(self), In(other), Out(out)) {
  return [=] { out.write(cpu::op("dot", self, other)); };
}
ACLNN(Addmm, In(self), In(mat1), In(mat2), Num(beta), Num(alpha), Out(out), Small(cube_math_type)) {
  check_product(mat1, mat2, out, cube_math_type);
  return [=] { out.write(scaled_sum(self, beta, cpu::op("mm", mat1.to(cpu::kFloat), mat2.to(cpu::kFloat)), alpha)); };
}
ACLNN(InplaceAddmm, Out(self), In(mat1), In(mat2), Num(beta), Num(alpha), Small(cube_math_type)) {
  check_product(mat1, mat2, self, cube_math_type);
  return [=] { self.write(scaled_sum(self, beta, cpu::op("mm", mat1.to(cpu::kFloat), mat2.to(cpu::kFloat)), alpha)); };
}
ACLNN(Baddbmm, In(self), In(batch1), In(batch2), Num(beta), Num(alpha), Out(out), Small(cube_math_type)) {
  check_product(batch1, batch2, out, cube_math_type);
  return [=] { out.write(scaled_sum(self, beta, cpu::op("bmm", batch1.to(cpu::kFloat), batch2.to(cpu::kFloat)), alpha)); };
}
ACLNN(Convolution, In(input), In(weight), Opt(bias), Ints(stride), Ints(padding), Ints(dilation), Flag(is_transposed),
      Ints(output_padding), Int(groups), Out(out), Small(cube_math_type)) {
  opapi::require_dtype(input, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "input");
  opapi::require_same_dtype(input, weight, "input and weight");
  return [=] {
    Tensor given = bias.is_given() ? bias.to(cpu::kFloat) : Tensor();
    out.write(cpu::op("convolution", input.to(cpu::kFloat), weight.to(cpu::kFloat), given, stride, padding, dilation, is_transposed,
                              output_padding, groups));
  };
}

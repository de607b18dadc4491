// Operators that work element by element: unary, binary, comparisons, logic. One line each.
#include "op.h"

// Name, and the ATen expression over `self`.
#define UNARY(NAME, EXPRESSION)                  \
  ACLNN(NAME, In(self), Out(out)) {              \
    return [=] { out.write(EXPRESSION); };       \
  }
#define UNARY_AND_INPLACE(NAME, EXPRESSION)      \
  UNARY(NAME, EXPRESSION)                        \
  ACLNN(Inplace##NAME, Out(self)) {              \
    return [=] { self.write(EXPRESSION); };      \
  }

UNARY(Abs, cpu::op("abs", self))
UNARY_AND_INPLACE(Acos, cpu::op("acos", self))
UNARY_AND_INPLACE(Asin, cpu::op("asin", self))
UNARY_AND_INPLACE(Atan, cpu::op("atan", self))
UNARY_AND_INPLACE(Ceil, cpu::op("ceil", self))
UNARY_AND_INPLACE(Cos, cpu::op("cos", self))
UNARY_AND_INPLACE(Cosh, cpu::op("cosh", self))
UNARY_AND_INPLACE(Erf, cpu::op("erf", self))
UNARY_AND_INPLACE(Exp, cpu::op("exp", self))
UNARY_AND_INPLACE(Exp2, cpu::op("exp2", self))
UNARY_AND_INPLACE(Expm1, cpu::op("expm1", self))
UNARY_AND_INPLACE(Floor, cpu::op("floor", self))
UNARY_AND_INPLACE(Frac, cpu::op("frac", self))
UNARY_AND_INPLACE(Log, cpu::op("log", self))
UNARY_AND_INPLACE(Log10, cpu::op("log10", self))
UNARY_AND_INPLACE(Log1p, cpu::op("log1p", self))
UNARY_AND_INPLACE(Log2, cpu::op("log2", self))
UNARY_AND_INPLACE(LogicalNot, cpu::op("logical_not", self))
UNARY(Neg, cpu::op("neg", self))
UNARY_AND_INPLACE(Reciprocal, cpu::op("reciprocal", self))
UNARY(Round, cpu::op("round", self))
UNARY_AND_INPLACE(Rsqrt, cpu::op("rsqrt", self))
UNARY_AND_INPLACE(Sigmoid, cpu::op("sigmoid", self))
UNARY_AND_INPLACE(Sin, cpu::op("sin", self))
UNARY_AND_INPLACE(Sinh, cpu::op("sinh", self))
UNARY_AND_INPLACE(Sqrt, cpu::op("sqrt", self))
UNARY_AND_INPLACE(Tan, cpu::op("tan", self))
UNARY_AND_INPLACE(Tanh, cpu::op("tanh", self))
UNARY(Trunc, cpu::op("trunc", self))
UNARY_AND_INPLACE(Relu, cpu::op("relu", self))
UNARY(BitwiseNot, cpu::op("bitwise_not", self))
UNARY(IsFinite, cpu::op("isfinite", self))
UNARY(IsNegInf, cpu::op("isneginf", self))
UNARY(IsPosInf, cpu::op("isposinf", self))
UNARY(Sign, cpu::op("sign", self))
UNARY(Signbit, cpu::op("signbit", self))
UNARY(Silu, cpu::op("silu", self))
UNARY(Gelu, cpu::op("gelu", self, std::string("tanh")))  // torch_npu calls it for both approximations, and it is this one
UNARY(FastGelu, self * cpu::op("sigmoid", self * cpu::Scalar(1.702)))
UNARY(Hardswish, cpu::op("hardswish", self))
UNARY(Mish, cpu::op("mish", self))

ACLNN(GeluV2, In(self), Int(approximate), Out(out)) {
  opapi::require(approximate == 0 || approximate == 1, "approximate is ", approximate, ", not 0 (none) or 1 (tanh)");
  opapi::require_dtype(self, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "self");
  opapi::require_same_shape(self, out, "self and out");
  return [=] { out.write(cpu::op("gelu", self, std::string(approximate == 1 ? "tanh" : "none"))); };
}

// ---- two operands: tensor and tensor, tensor and scalar; out of place and in place
#define BINARY(NAME, EXPRESSION)                       \
  ACLNN(NAME, In(self), In(other), Out(out)) {         \
    return [=] { out.write(EXPRESSION); };             \
  }
#define BINARY_SCALAR(NAME, EXPRESSION)                \
  ACLNN(NAME, In(self), Num(other), Out(out)) {        \
    return [=] { out.write(EXPRESSION); };             \
  }
#define INPLACE_BINARY(NAME, EXPRESSION)               \
  ACLNN(Inplace##NAME, Out(self), In(other)) {         \
    return [=] { self.write(EXPRESSION); };            \
  }
#define INPLACE_BINARY_SCALAR(NAME, EXPRESSION)        \
  ACLNN(Inplace##NAME, Out(self), Num(other)) {        \
    return [=] { self.write(EXPRESSION); };            \
  }
#define BINARY_ALL(TENSOR_NAME, SCALAR_NAME, EXPRESSION) \
  BINARY(TENSOR_NAME, EXPRESSION)                        \
  BINARY_SCALAR(SCALAR_NAME, EXPRESSION)                 \
  INPLACE_BINARY(TENSOR_NAME, EXPRESSION)                \
  INPLACE_BINARY_SCALAR(SCALAR_NAME, EXPRESSION)

BINARY_ALL(Mul, Muls, cpu::op("mul", self, other))
BINARY_ALL(Div, Divs, cpu::op("div", self, other))
BINARY_ALL(FloorDivide, FloorDivides, cpu::op("floor_divide", self, other))
BINARY_ALL(EqTensor, EqScalar, cpu::op("eq", self, other))
BINARY_ALL(NeTensor, NeScalar, cpu::op("ne", self, other))
BINARY_ALL(GtTensor, GtScalar, cpu::op("gt", self, other))
BINARY_ALL(GeTensor, GeScalar, cpu::op("ge", self, other))
BINARY_ALL(LtTensor, LtScalar, cpu::op("lt", self, other))
BINARY_ALL(LeTensor, LeScalar, cpu::op("le", self, other))
BINARY_ALL(BitwiseAndTensor, BitwiseAndScalar, cpu::op("bitwise_and", self, other))
BINARY(BitwiseOrTensor, cpu::op("bitwise_or", self, other))
BINARY_SCALAR(BitwiseOrScalar, cpu::op("bitwise_or", self, other))
BINARY_ALL(BitwiseXorTensor, BitwiseXorScalar, cpu::op("bitwise_xor", self, other))
BINARY_ALL(RemainderTensorTensor, RemainderTensorScalar, cpu::op("remainder", self, other))
BINARY_ALL(FmodTensor, FmodScalar, cpu::op("fmod", self, other))
BINARY_ALL(PowTensorTensor, PowTensorScalar, cpu::op("pow", self, other))
BINARY(LogicalAnd, cpu::op("logical_and", self, other))
BINARY(LogicalOr, cpu::op("logical_or", self, other))
BINARY(LogicalXor, cpu::op("logical_xor", self, other))
INPLACE_BINARY(LogicalAnd, cpu::op("logical_and", self, other))
INPLACE_BINARY(LogicalOr, cpu::op("logical_or", self, other))
BINARY(Maximum, cpu::op("maximum", self, other))
BINARY(Minimum, cpu::op("minimum", self, other))
BINARY(Atan2, cpu::op("atan2", self, other))
BINARY(LeftShift, cpu::op("bitwise_left_shift", self, other))
BINARY(RightShift, cpu::op("bitwise_right_shift", self, other))
BINARY_SCALAR(LeftShifts, cpu::op("bitwise_left_shift", self, other))

ACLNN(PowScalarTensor, Num(self), In(exponent), Out(out)) {
  return [=] { out.write(cpu::op("pow", self, exponent)); };
}
ACLNN(RemainderScalarTensor, Num(self), In(other), Out(out)) {
  return [=] { out.write(cpu::op("remainder", self, other)); };
}

// ---- add and subtract carry a factor
#define SUM_LIKE(NAME, EXPRESSION)                                      \
  ACLNN(NAME, In(self), In(other), Num(alpha), Out(out)) {              \
    return [=] { out.write(EXPRESSION); };                              \
  }                                                                     \
  ACLNN(NAME##s, In(self), Num(other), Num(alpha), Out(out)) {          \
    return [=] { out.write(EXPRESSION); };                              \
  }                                                                     \
  ACLNN(Inplace##NAME, Out(self), In(other), Num(alpha)) {              \
    return [=] { self.write(EXPRESSION); };                             \
  }                                                                     \
  ACLNN(Inplace##NAME##s, Out(self), Num(other), Num(alpha)) {          \
    return [=] { self.write(EXPRESSION); };                             \
  }
SUM_LIKE(Add, cpu::op("add", self, other, alpha))
SUM_LIKE(Sub, cpu::op("sub", self, other, alpha))

ACLNN(Rsub, In(self), In(other), Num(alpha), Out(out)) {
  return [=] { out.write(cpu::op("rsub", self, other, alpha)); };
}
ACLNN(Rsubs, In(self), Num(other), Num(alpha), Out(out)) {
  return [=] { out.write(cpu::op("rsub", self, other, alpha)); };
}
ACLNN(AddV3, Num(self), In(other), Num(alpha), Out(out)) {
  return [=] { out.write(cpu::op("add", cpu::op("mul", other, alpha), self)); };
}

// ---- division with a rounding mode: 0 true, 1 truncated, 2 floored
namespace {
template <class Other>
cpu::Tensor divide(const cpu::Tensor& self, const Other& other, int64_t mode) {
  if (mode == 0) return cpu::op("div", self, other);
  return cpu::op("div", self, other, std::string(mode == 1 ? "trunc" : "floor"));
}
}  // namespace
ACLNN(DivMod, In(self), In(other), Int(mode), Out(out)) {
  opapi::require(mode >= 0 && mode <= 2, "mode is ", mode);
  return [=] { out.write(divide(self, other, mode)); };
}
ACLNN(DivMods, In(self), Num(other), Int(mode), Out(out)) {
  opapi::require(mode >= 0 && mode <= 2, "mode is ", mode);
  return [=] { out.write(divide(self, other, mode)); };
}
ACLNN(InplaceDivMod, Out(self), In(other), Int(mode)) {
  opapi::require(mode >= 0 && mode <= 2, "mode is ", mode);
  return [=] { self.write(divide(self, other, mode)); };
}
ACLNN(InplaceDivMods, Out(self), Num(other), Int(mode)) {
  opapi::require(mode >= 0 && mode <= 2, "mode is ", mode);
  return [=] { self.write(divide(self, other, mode)); };
}

// ---- three operands
ACLNN(InplaceAddcmul, Out(self), In(tensor1), In(tensor2), Num(value)) {
  return [=] { self.write(cpu::op("addcmul", self, tensor1, tensor2, value)); };
}
ACLNN(Softplus, In(self), Num(beta), Num(threshold), Out(out)) {
  return [=] { out.write(cpu::op("softplus", self, beta, threshold)); };
}
ACLNN(Addcmul, In(self), In(tensor1), In(tensor2), Num(value), Out(out)) {
  return [=] { out.write(cpu::op("addcmul", self, tensor1, tensor2, value)); };
}
ACLNN(Addcdiv, In(self), In(tensor1), In(tensor2), Num(value), Out(out)) {
  return [=] { out.write(cpu::op("addcdiv", self, tensor1, tensor2, value)); };
}
ACLNN(Lerp, In(self), In(end), In(weight), Out(out)) {
  return [=] { out.write(cpu::op("lerp", self, end, weight)); };
}
ACLNN(Lerps, In(self), In(end), Num(weight), Out(out)) {
  return [=] { out.write(cpu::op("lerp", self, end, weight)); };
}
ACLNN(SWhere, In(condition), In(self), In(other), Out(out)) {
  opapi::require_dtype(condition, {cpu::kBool, cpu::kByte}, "condition");
  return [=] { out.write(cpu::op("where", condition.to(cpu::kBool), self, other)); };
}

// ---- clamp
ACLNN(Clamp, In(self), OptNum(low), OptNum(high), Out(out)) {
  return [=] { out.write(cpu::op("clamp", self, low, high)); };
}
ACLNN(ClampTensor, In(self), Opt(low), Opt(high), Out(out)) {
  return [=] { out.write(cpu::op("clamp.Tensor", self, low, high)); };
}
ACLNN(ClampMin, In(self), Num(low), Out(out)) {
  return [=] { out.write(cpu::op("clamp_min", self, low)); };
}
ACLNN(ClampMax, In(self), Num(high), Out(out)) {
  return [=] { out.write(cpu::op("clamp_max", self, high)); };
}
ACLNN(ClampMinTensor, In(self), In(low), Out(out)) {
  return [=] { out.write(cpu::op("clamp_min", self, low)); };
}
ACLNN(ClampMaxTensor, In(self), In(high), Out(out)) {
  return [=] { out.write(cpu::op("clamp_max", self, high)); };
}
ACLNN(InplaceClampMax, Out(self), Num(high)) {
  return [=] { self.write(cpu::op("clamp_max", self, high)); };
}
ACLNN(InplaceClampMinTensor, Out(self), In(low)) {
  return [=] { self.write(cpu::op("clamp_min", self, low)); };
}
ACLNN(InplaceClampMaxTensor, Out(self), In(high)) {
  return [=] { self.write(cpu::op("clamp_max", self, high)); };
}
ACLNN(NanToNum, In(self), Float(nan), Float(positive), Float(negative), Out(out)) {
  return [=] { out.write(cpu::op("nan_to_num", self, nan, positive, negative)); };
}

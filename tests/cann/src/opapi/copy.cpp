// Operators that move or make values: copies, casts, fills, ranges, concatenation, padding.
#include "op.h"

namespace {
// Bytes that a copy on the device moves: the cost a program should not pay for a whole KV cache.
void count_copy(const char* name, const cpu::Tensor& destination) {
  emu::count("copies", "d2d_operator", destination.numel() * destination.element_size());
  emu::count("copy_operators", name, destination.numel() * destination.element_size());
}
}  // namespace

ACLNN(InplaceCopy, Out(self), In(source)) {
  return [=] {
    count_copy("aclnnInplaceCopy", self);
    self.write(source.expand(self.sizes()));
  };
}
ACLNN(Cast, In(self), Type(dtype), Out(out)) {
  opapi::require(out.type() == dtype, "out has dtype ", out.type(), ", the call asks for ", dtype);
  opapi::require_same_shape(self, out, "self and out");
  return [=] { out.write(self.to(dtype)); };
}

// ---- constants
ACLNN(InplaceZero, Out(self)) {
  return [=] { self.fill_(0); };
}
ACLNN(InplaceOne, Out(self)) {
  return [=] { self.fill_(1); };
}
ACLNN(InplaceFillScalar, Out(self), Num(value)) {
  return [=] { self.fill_(value); };
}
ACLNN(InplaceFillTensor, Out(self), In(value)) {
  opapi::require(value.numel() == 1, "value has shape ", value.sizes(), ", not one element");
  return [=] { self.copy_(value.reshape({}).expand(self.sizes())); };
}
ACLNN(Arange, Num(start), Num(end), Num(step), Out(out)) {
  opapi::require(step.to_double() != 0, "step is 0");
  return [=] { out.write(cpu::op("arange.start_step", start, end, step, out.type())); };
}
ACLNN(Range, Num(start), Num(end), Num(step), Out(out)) {
  opapi::require(step.to_double() != 0, "step is 0");
  return [=] { out.write(cpu::op("range.step", start, end, step, out.type())); };
}
ACLNN(Linspace, Num(start), Num(end), Int(steps), Out(out)) {
  opapi::require(steps >= 0, "steps is ", steps);
  return [=] { out.write(cpu::op("linspace", start, end, steps, out.type())); };
}
ACLNN(Eye, Int(n), Int(m), Out(out)) {
  opapi::require(n >= 0 && m >= 0, "the matrix is ", n, " by ", m);
  return [=] { out.write(cpu::op("eye.m", n, m, out.type())); };
}
ACLNN(OneHot, In(self), Int(num_classes), In(on_value), In(off_value), Int(axis), Out(out)) {
  opapi::require_dtype(self, {cpu::kInt, cpu::kLong}, "self");
  opapi::require(num_classes >= 0, "numClasses is ", num_classes);
  return [=] {
    cpu::Tensor is_on = cpu::op("eq", self.unsqueeze(-1).to(cpu::kLong), cpu::arange(num_classes));
    cpu::Tensor hot = cpu::op("where", is_on, on_value.reshape({}), off_value.reshape({}));
    out.write(axis == -1 ? hot : cpu::op("movedim.int", hot, -1, axis));
  };
}

// ---- shape
ACLNN(Cat, Ins(tensors), Int(dim), Out(out)) {
  opapi::require(!tensors.empty(), "tensors is empty");
  return [=] {
    std::vector<cpu::Tensor> parts(tensors.begin(), tensors.end());
    out.write(cpu::op("cat", parts, dim));
  };
}
ACLNN(Stack, Ins(tensors), Int(dim), Out(out)) {
  opapi::require(!tensors.empty(), "tensors is empty");
  for (const auto& tensor : tensors) opapi::require_same_shape(tensor, tensors.front(), "tensors");
  return [=] {
    std::vector<cpu::Tensor> parts(tensors.begin(), tensors.end());
    out.write(cpu::op("stack", parts, dim));
  };
}
ACLNN(Repeat, In(self), Ints(repeats), Out(out)) {
  return [=] { out.write(cpu::op("repeat", self, repeats)); };
}
ACLNN(Flip, In(self), Ints(dims), Out(out)) {
  return [=] { out.write(cpu::op("flip", self, dims)); };
}
ACLNN(Roll, In(self), Ints(shifts), Ints(dims), Out(out)) {
  return [=] { out.write(cpu::op("roll", self, shifts, dims)); };
}
ACLNN(ConstantPadNd, In(self), Ints(padding), Num(value), Out(out)) {
  return [=] { out.write(cpu::op("constant_pad_nd", self, padding, value)); };
}
ACLNN(Triu, In(self), Int(diagonal), Out(out)) {
  return [=] { out.write(cpu::op("triu", self, diagonal)); };
}
ACLNN(Tril, In(self), Int(diagonal), Out(out)) {
  return [=] { out.write(cpu::op("tril", self, diagonal)); };
}
ACLNN(InplaceTriu, Out(self), Int(diagonal)) {
  return [=] { self.write(cpu::op("triu", self, diagonal)); };
}
ACLNN(InplaceTril, Out(self), Int(diagonal)) {
  return [=] { self.write(cpu::op("tril", self, diagonal)); };
}
ACLNN(RepeatInterleave, In(self), In(repeats), Int(output_size), Out(out)) {
  return [=] { out.write(cpu::op("repeat_interleave", self.flatten(), repeats.to(cpu::kLong), 0, output_size)); };
}
ACLNN(RepeatInterleaveWithDim, In(self), In(repeats), Int(dim), Int(output_size), Out(out)) {
  return [=] { out.write(cpu::op("repeat_interleave", self, repeats.to(cpu::kLong), dim, output_size)); };
}
ACLNN(RepeatInterleaveInt, In(self), Int(repeats), Int(output_size), Out(out)) {
  return [=] { out.write(cpu::op("repeat_interleave", self.flatten(), repeats, 0, output_size)); };
}
ACLNN(RepeatInterleaveIntWithDim, In(self), Int(repeats), Int(dim), Int(output_size), Out(out)) {
  return [=] { out.write(cpu::op("repeat_interleave", self, repeats, dim, output_size)); };
}
ACLNN(RepeatInterleaveTensor, In(repeats), Int(output_size), Out(out)) {
  return [=] { out.write(cpu::op("repeat_interleave", repeats.to(cpu::kLong), output_size)); };
}

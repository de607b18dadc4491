// Random numbers: Philox 4x32, as on the device, one stream for each element, from the (seed, offset) that torch_npu hands over.
// The variants that end in Tensor read seed and offset from device memory: graphs draw anew at each replay.
#include <cmath>

#include "op.h"
#include "philox.h"

using cpu::Tensor;
using opapi::device_check;
using opapi::require;

namespace {

struct Source {
  uint64_t seed, offset;
  opapi::Philox engine(int64_t element) const { return opapi::Philox(seed, static_cast<uint64_t>(element), offset); }
};

Source source_of(int64_t seed, int64_t offset) { return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)}; }

Source source_in(const Tensor& seed, const Tensor& offset, int64_t offset_in_graph) {
  auto first = [](const Tensor& x) { return *static_cast<const int64_t*>(x.to(cpu::kLong).data()); };
  return source_of(first(seed), first(offset) + offset_in_graph);
}

// [0, 1) with 24 bits, so that no value rounds up to 1 in float32.
Tensor uniform(const cpu::Ints& shape, const Source& source) {
  Tensor values = cpu::empty(shape, cpu::kDouble);
  auto* out = static_cast<double*>(values.data());
  for (int64_t i = 0; i < values.numel(); ++i) out[i] = static_cast<double>(source.engine(i)() >> 8) / 16777216.0;
  return values;
}

Tensor normal(const cpu::Ints& shape, const Source& source, double mean, double std) {
  Tensor values = cpu::empty(shape, cpu::kDouble);
  auto* out = static_cast<double*>(values.data());
  for (int64_t i = 0; i < values.numel(); ++i) {
    opapi::Philox engine = source.engine(i);
    double u = (static_cast<double>(engine()) + 1) / 4294967296.0, v = static_cast<double>(engine()) / 4294967296.0;
    out[i] = mean + std * std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
  }
  return values;
}

// Below `to` in the output's own precision too: bfloat16 would round 0.999 up.
void write_uniform(const opapi::Output& self, double from, double to, const Source& source) {
  Tensor rounded = (uniform(self.sizes(), source) * cpu::Scalar(to - from) + cpu::Scalar(from)).to(self.type());
  self.write(rounded.masked_fill(rounded.to(cpu::kDouble) >= cpu::Scalar(to), from));
}

void write_integers(const opapi::Output& self, int64_t from, int64_t to, const Source& source) {
  Tensor values = cpu::empty(self.sizes(), cpu::kLong);
  auto* out = static_cast<int64_t*>(values.data());
  uint64_t range = static_cast<uint64_t>(to) - static_cast<uint64_t>(from);
  for (int64_t i = 0; i < values.numel(); ++i) {
    opapi::Philox engine = source.engine(i);
    uint64_t high = engine(), low = engine();
    out[i] = from + static_cast<int64_t>(((high << 32) | low) % range);
  }
  self.write(values);
}

// Rows of weights that need not sum to 1. Without replacement: the largest of weight / exponential, as torch does.
Tensor multinomial(const Tensor& weights, int64_t num_samples, bool replacement, const Source& source) {
  Tensor wide = (weights.dim() == 1 ? weights.unsqueeze(0) : weights).to(cpu::kDouble);
  Tensor totals = wide.cumsum(-1), total = totals.narrow(-1, -1, 1);
  bool is_valid = cpu::op("all", cpu::op("isfinite", wide)).truth() && cpu::op("all", wide >= cpu::Scalar(0)).truth() &&
                  cpu::op("all", total > cpu::Scalar(0)).truth();
  device_check(is_valid, "probabilities have to be finite and not negative, with a positive sum");
  Tensor picked;
  if (replacement) {
    Tensor draws = uniform({wide.size(0), num_samples}, source) * total;
    picked = cpu::op("clamp_max", cpu::op("searchsorted.Tensor", totals, draws, false, true), wide.size(1) - 1);
  } else {
    Tensor exponential = -cpu::op("log1p", -uniform(wide.sizes(), source));
    picked = cpu::ops("topk", wide / cpu::op("clamp_min", exponential, 1e-30), num_samples, -1)[1];
  }
  return weights.dim() == 1 ? picked.squeeze(0) : picked;
}

void check_multinomial(const Tensor& self, int64_t num_samples, bool replacement, const Tensor& out) {
  opapi::require_dtype(self, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16, cpu::kDouble}, "self");
  opapi::require_dtype(out, {cpu::kLong}, "out");
  require(self.dim() == 1 || self.dim() == 2, "self has ", self.dim(), " dimensions");
  require(num_samples > 0 && (replacement || num_samples <= self.size(-1)), "numsamples is ", num_samples, " of ", self.size(-1));
}

}  // namespace

ACLNN(InplaceUniform, Out(self), Double(from), Double(to), Int(seed), Int(offset)) {
  require(from <= to, "from ", from, ", to ", to);
  return [=] { write_uniform(self, from, to, source_of(seed, offset)); };
}
ACLNN(InplaceUniformTensor, Out(self), Double(from), Double(to), In(seed), In(offset), Int(offset_in_graph)) {
  require(from <= to, "from ", from, ", to ", to);
  return [=] { write_uniform(self, from, to, source_in(seed, offset, offset_in_graph)); };
}
ACLNN(InplaceNormal, Out(self), Float(mean), Float(std), Int(seed), Int(offset)) {
  require(std >= 0, "std is ", std);
  return [=] { self.write(normal(self.sizes(), source_of(seed, offset), mean, std)); };
}
ACLNN(InplaceNormalTensor, Out(self), Float(mean), Float(std), In(seed), In(offset), Int(offset_in_graph)) {
  require(std >= 0, "std is ", std);
  return [=] { self.write(normal(self.sizes(), source_in(seed, offset, offset_in_graph), mean, std)); };
}
ACLNN(NormalFloatFloat, Float(mean), Float(std), Int(seed), Int(offset), Out(out)) {
  require(std >= 0, "std is ", std);
  return [=] { out.write(normal(out.sizes(), source_of(seed, offset), mean, std)); };
}
ACLNN(InplaceRandom, Out(self), Int(from), Int(to), Int(seed), Int(offset)) {
  require(from < to, "from ", from, ", to ", to);
  return [=] { write_integers(self, from, to, source_of(seed, offset)); };
}
ACLNN(InplaceRandomTensor, Out(self), Int(from), Int(to), In(seed), In(offset), Int(offset_in_graph)) {
  require(from < to, "from ", from, ", to ", to);
  return [=] { write_integers(self, from, to, source_in(seed, offset, offset_in_graph)); };
}
ACLNN(InplaceBernoulli, Out(self), Num(probability), Int(seed), Int(offset)) {
  require(probability.to_double() >= 0 && probability.to_double() <= 1, "prob is ", probability.to_double());
  return [=] { self.write(cpu::op("lt", uniform(self.sizes(), source_of(seed, offset)), probability)); };
}
ACLNN(InplaceBernoulliTensor, Out(self), In(probability), Int(seed), Int(offset)) {
  return [=] { self.write(uniform(self.sizes(), source_of(seed, offset)) < probability.to(cpu::kDouble)); };
}
ACLNN(Randperm, Int(n), Int(seed), Int(offset), Out(out)) {
  require(n >= 0 && out.dim() == 1 && out.size(0) == n, "n is ", n, ", out ", out.sizes());
  return [=] { out.write(cpu::op("argsort.stable", uniform({n}, source_of(seed, offset)), true, 0, false)); };
}
ACLNN(Multinomial, In(self), Int(num_samples), Flag(replacement), Int(seed), Int(offset), Out(out)) {
  check_multinomial(self, num_samples, replacement, out);
  return [=] { out.write(multinomial(self, num_samples, replacement, source_of(seed, offset))); };
}
ACLNN(MultinomialTensor, In(self), Int(num_samples), Flag(replacement), In(seed), In(offset), Int(offset_in_graph), Out(out)) {
  check_multinomial(self, num_samples, replacement, out);
  return [=] { out.write(multinomial(self, num_samples, replacement, source_in(seed, offset, offset_in_graph))); };
}

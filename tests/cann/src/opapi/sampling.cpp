// Filters on logits.
#include <algorithm>
#include <limits>

#include "op.h"

using cpu::Tensor;
using opapi::require;
using opapi::require_code;

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Keeps the k largest of a row, then the smallest set whose probabilities exceed p; -inf elsewhere. Either may be absent.
Tensor filtered(const Tensor& logits, const opapi::Input& p, const opapi::Input& k) {
  std::vector<Tensor> both = cpu::ops("sort.stable", logits.to(cpu::kFloat), true, -1, false);
  Tensor values = both[0], order = both[1];
  int64_t vocabulary = logits.size(1);
  if (k.is_given()) {
    // Documented as 1 to 1024 and no more than there are logits; a device does not look and filters wrongly.
    opapi::device_check_index(k, 1, std::min<int64_t>(1024, vocabulary) + 1, "k");
    Tensor threshold = values.gather(1, cpu::op("rsub", k.to(cpu::kLong), vocabulary).unsqueeze(1));
    values = values.masked_fill(values < threshold, kMinusInfinity);
  }
  if (p.is_given()) {
    bool is_valid = cpu::op("all", cpu::op("logical_and", p >= cpu::Scalar(0), p <= cpu::Scalar(1))).truth();
    opapi::device_check(is_valid, "p holds a value outside [0, 1]");
    Tensor hidden = cpu::op("softmax.int", values, -1).cumsum(-1) <= cpu::op("rsub", p.to(cpu::kFloat), 1).unsqueeze(1);
    hidden.select(1, vocabulary - 1).fill_(false);  // at least one stays
    values = values.masked_fill(hidden, kMinusInfinity);
  }
  return cpu::op("scatter.src", values, 1, order, values);
}

}  // namespace

ACLNN(ApplyTopKTopP, In(logits), Opt(p), Opt(k), Out(out)) {
  opapi::require_dtype(logits, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "logits");
  opapi::require_dim(logits, 2, "logits");
  opapi::require_same_dtype(logits, out, "logits and out");
  opapi::require_same_shape(logits, out, "logits and out");
  require_code(kParamNull, p.is_given() || k.is_given(), "p and k are both null");
  if (p.is_given()) {
    opapi::require_same_dtype(logits, p, "logits and p");
    require(p.sizes() == cpu::Ints{logits.size(0)}, "p ", p.sizes(), ", logits ", logits.sizes());
  }
  if (k.is_given()) {
    opapi::require_dtype(k, {cpu::kInt}, "k");
    require(k.sizes() == cpu::Ints{logits.size(0)}, "k ", k.sizes(), ", logits ", logits.sizes());
  }
  return [=] { out.write(filtered(logits, p, k)); };
}

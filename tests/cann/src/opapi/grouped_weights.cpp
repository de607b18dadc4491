// Products of 16-bit inputs with weights of 4 or 8 bit integers: w = (q + offset) * scale, by output or by group of inputs.
// A weight is rounded once to x's type; sums and bias are float32 and rounded once. M rows, K inputs, N outputs.
#include "op.h"

#define EMU_C_GroupSize(x) int32_t x
#define EMU_V_GroupSize(x) [[maybe_unused]] int64_t x
#define EMU_A_GroupSize(x) x

using cpu::Tensor;
using opapi::require;
using opapi::require_dtype;

namespace {

constexpr int64_t kInWord = 8, kLeastGroup = 32, kFractalBytes = 32, kBytesOfWord = 4;

bool is_there(const opapi::Input& input) { return input.is_given() && input.numel() > 0; }

// Two's complement in 4 bits, eight of the last dim in a word, the lowest first.
Tensor unpacked(const Tensor& words) {
  std::vector<Tensor> nibbles;
  for (int64_t place = 0; place < kInWord; ++place) {
    Tensor raw = cpu::op("bitwise_and", cpu::op("bitwise_right_shift", words, 4 * place), 15);
    nibbles.push_back(cpu::op("sub", cpu::op("bitwise_xor", raw, 8), 8));
  }
  return cpu::op("stack", nibbles, -1).flatten(-2);
}

// Groups stand in the first dim, and an output's own scale is one of a single group.
Tensor of_inputs(const Tensor& given, int64_t inputs, int64_t group_size) {
  Tensor wide = given.to(cpu::kFloat);
  if (group_size == 0) return wide.reshape({1, wide.numel()});
  return wide.repeat_interleave(group_size, 0).narrow(0, 0, inputs);
}

void check_scales(const Tensor& x, const Tensor& scale, const opapi::Input& offset, int64_t outputs, int64_t group_size) {
  int64_t inputs = x.size(1);
  opapi::require_same_dtype(x, scale, "x and antiquantScale");
  cpu::Ints sizes = scale.sizes();
  if (group_size == 0) {
    require(sizes == cpu::Ints{outputs} || sizes == cpu::Ints{1, outputs}, "antiquantScale ", sizes, " for ", outputs, " outputs");
  } else {
    require(group_size % kLeastGroup == 0 && group_size >= kLeastGroup && group_size <= inputs - 1, "antiquantGroupSize ", group_size,
            ": a multiple of 32, below ", inputs, " inputs");
    require(sizes == cpu::Ints{(inputs + group_size - 1) / group_size, outputs}, "antiquantScale ", sizes, " for ", inputs, " inputs in groups of ",
            group_size, " and ", outputs, " outputs");
  }
  if (!is_there(offset)) return;
  opapi::require_same_dtype(x, offset, "x and antiquantOffset");
  opapi::require_same_shape(scale, offset, "antiquantScale and antiquantOffset");
}

// What its document lists: 8 bits by output; 4 bits in groups, as npu_convert_weight_to_int4pack lays them out. 4 bits by output would be turned.
void check_fractal(const Tensor& x, const opapi::Input& weight, int64_t group_size) {
  if (weight.type() == cpu::kChar) {
    require(group_size == 0, "int8 in groups does not lie in FRACTAL_NZ");
    return opapi::require_fractal(weight, kFractalBytes, "weight");
  }
  require(group_size > 0, "int4 by output in FRACTAL_NZ has to be turned, which is not emulated");
  require(x.is_contiguous(), "x is turned, beside int4 in groups in FRACTAL_NZ");
  require(group_size == 64 || group_size == 128, "antiquantGroupSize ", group_size, ": 64 or 128 for int4 in FRACTAL_NZ");
  require(weight.size(0) % group_size == 0, "K ", weight.size(0), " is no multiple of antiquantGroupSize ", group_size);
  require(weight.size(1) * kInWord % 64 == 0, "N ", weight.size(1) * kInWord, " is no multiple of 64, for int4 in FRACTAL_NZ");
  opapi::require_fractal(weight, kFractalBytes / kBytesOfWord, "weight");
}

}  // namespace

ACLNN(WeightQuantBatchMatmulV2, In(x), InAnyLayout(weight), In(antiquant_scale), Opt(antiquant_offset), Opt(quant_scale), Opt(quant_offset), Opt(bias),
      GroupSize(group_size), Out(y)) {
  require_dtype(x, {cpu::kHalf, cpu::kBFloat16}, "x");
  require_dtype(weight, {cpu::kChar, cpu::kInt}, "weight");
  require(x.dim() == 2 && weight.dim() == 2, "x ", x.sizes(), ", weight ", weight.sizes(), ": both have two dimensions");
  bool is_packed = weight.type() == cpu::kInt;
  if (weight.is_fractal()) check_fractal(x, weight, group_size);
  require(weight.is_contiguous() || (!is_packed && weight.transpose(0, 1).is_contiguous()), "weight ", weight.sizes(),
          " is neither contiguous nor, in 8 bits, transposed");
  int64_t outputs = weight.size(1) * (is_packed ? kInWord : 1);
  require(x.size(1) == weight.size(0), "x ", x.sizes(), " times weight ", weight.sizes());
  check_scales(x, antiquant_scale, antiquant_offset, outputs, group_size);
  require(!is_there(quant_scale) && !is_there(quant_offset), "quantScale and quantOffset are not emulated");
  if (is_there(bias)) {
    require_dtype(bias, {x.type() == cpu::kBFloat16 ? cpu::kFloat : cpu::kHalf}, "bias");
    require(bias.sizes() == cpu::Ints{outputs}, "bias ", bias.sizes(), " for ", outputs, " outputs");
  }
  opapi::require_same_dtype(x, y, "x and y");
  require(y.sizes() == cpu::Ints{x.size(0), outputs}, "y ", y.sizes(), ", x ", x.sizes(), ", ", outputs, " outputs");
  return [=] {
    Tensor wide = (is_packed ? unpacked(weight.plain()) : weight.plain()).to(cpu::kFloat);
    if (is_there(antiquant_offset)) wide = wide + of_inputs(antiquant_offset, x.size(1), group_size);
    Tensor rounded = (wide * of_inputs(antiquant_scale, x.size(1), group_size)).to(x.type());
    Tensor out = cpu::op("mm", x.to(cpu::kFloat), rounded.to(cpu::kFloat));
    y.write(is_there(bias) ? out + bias.to(cpu::kFloat) : out);
  };
}

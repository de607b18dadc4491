// Mixtures of experts: choosing experts, sorting tokens by expert, products by group, and putting tokens back together.
// T tokens, K experts of a token, E experts.
#include <cmath>

#include "op.h"
#include "rounding.h"

using cpu::Tensor;
using opapi::device_check;
using opapi::require;
using opapi::require_dtype;

namespace {

constexpr auto kFloats = {cpu::kFloat, cpu::kHalf, cpu::kBFloat16};
// What integers hold that no operator wrote.
constexpr double kNoNumber = 1 << 30;
constexpr int64_t kFractalWidth = 32;

template <class... Parts>
void require_tiling(bool holds, const Parts&... parts) {
  opapi::require_code(kInnerTilingError, holds, parts...);
}

// The largest k of each row and where they stood; among equals the first ones, which no document promises.
std::pair<Tensor, Tensor> top_k(const Tensor& x, int64_t k) {
  std::vector<Tensor> sorted = cpu::ops("sort.stable", x, true, -1, true);
  return {sorted[0].narrow(-1, 0, k), sorted[1].narrow(-1, 0, k)};
}

}  // namespace

// renorm 0: softmax over all experts, then the largest k; 1: the largest k, then softmax over these.
ACLNN(MoeGatingTopKSoftmaxV2, In(x), Opt(finished), Int(k), Int(renorm), Flag(gives_softmax), Out(y), Out(expert_idx), OptOut(softmax)) {
  require_dtype(x, kFloats, "x");
  opapi::require_same_dtype(x, y, "x and y");
  require_dtype(expert_idx, {cpu::kInt}, "expertIdx");
  require_tiling(x.dim() == 2 || x.dim() == 3, "x ", x.sizes(), " has neither 2 nor 3 dimensions");
  require_tiling(k > 0 && k <= 1024 && k <= x.size(-1), "k is ", k, ": 1 to 1024, and no more than the ", x.size(-1), " experts");
  require_tiling(renorm == 0 || renorm == 1, "renorm is ", renorm, ", neither 0 nor 1");
  require_tiling(y.size(-1) == k && expert_idx.sizes() == y.sizes(), "y ", y.sizes(), ", expertIdx ", expert_idx.sizes(), ", k ", k);
  if (finished.is_given()) require_dtype(finished, {cpu::kBool}, "finished");
  bool writes_softmax = gives_softmax && renorm == 0;
  return [=] {
    Tensor wide = x.to(cpu::kFloat), shares = renorm == 0 ? cpu::op("softmax.int", wide, -1) : wide;
    auto [values, experts] = top_k(shares, k);
    if (finished.is_given()) experts = experts.masked_fill(finished.unsqueeze(-1), x.size(-1));
    y.write(renorm == 0 ? values : cpu::op("softmax.int", values, -1));
    expert_idx.write(experts);
    if (writes_softmax) softmax.write(shares);
  };
}

namespace {

struct Routing {
  int64_t first, last, row_idx_type;
};

// Rows of x in the order of their experts: the pairs (token, choice) of active experts first, stable within an expert. With
// `expanded_scale` they are rounded by their largest values.
void route(const Routing& routing, const Tensor& x, const Tensor& expert_idx, const opapi::Output& expanded_x, const opapi::Output& row_idx,
           const opapi::Output& counts, const opapi::Output* expanded_scale) {
  int64_t k = expert_idx.size(1), pairs = expert_idx.numel();
  Tensor flat = expert_idx.reshape({-1}).to(cpu::kLong);
  Tensor is_idle = cpu::op("logical_or", flat < cpu::Scalar(routing.first), flat >= cpu::Scalar(routing.last));
  Tensor order = cpu::ops("sort.stable", flat.masked_fill(is_idle, routing.last), true, -1, false)[1];
  auto active = static_cast<int64_t>(cpu::op("sum", cpu::op("logical_not", is_idle)).item());
  Tensor first = order.narrow(0, 0, active), places = cpu::arange(pairs).narrow(0, 0, active);
  // Rows behind the active ones keep whatever the memory held, as documented: the worst of it.
  if (active < pairs && expanded_x.type() != cpu::kChar) expanded_x.narrow(0, active, pairs - active).fill_(std::nan(""));
  Tensor rows = x.index_select(0, cpu::op("floor_divide", first, k));
  if (expanded_scale != nullptr) {
    auto [values, scales] = opapi::rounded_rows(rows.to(cpu::kFloat));
    expanded_x.narrow(0, 0, active).copy_(values);
    expanded_scale->narrow(0, 0, active).copy_(scales);
    if (active < pairs) expanded_scale->narrow(0, active, pairs - active).fill_(std::nan(""));
  } else {
    expanded_x.narrow(0, 0, active).copy_(rows);
  }
  if (routing.row_idx_type == 0) {
    row_idx.fill_(-1);
    row_idx.index_put_({first}, places.to(cpu::kInt));
  } else {
    row_idx.narrow(0, 0, active).copy_(first);
  }
  for (int64_t expert = routing.first; expert < routing.last; ++expert) {
    counts[expert - routing.first].copy_(cpu::op("sum", cpu::op("eq.Scalar", flat, expert)));
  }
}

}  // namespace

// Dropless, rows as they are or rounded to int8 (quantMode 1), counts by expert: the rest is not emulated. activeNum has to be T * K in the older documents.
ACLNN(MoeInitRoutingV3, In(x), In(expert_idx), Opt(scale), Opt(offset), Int(active_num), Int(expert_capacity), Int(expert_num),
      Int(drop_pad_mode), Int(expert_tokens_num_type), Flag(expert_tokens_num_flag), Int(quant_mode), OptInts(active_expert_range),
      Int(row_idx_type), Out(expanded_x), Out(expanded_row_idx), Out(expert_tokens), OptOut(expanded_scale)) {
  require_dtype(x, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16, cpu::kChar}, "x");
  require_dtype(expert_idx, {cpu::kInt}, "expertIdx");
  require_dtype(expert_tokens, {cpu::kLong}, "expertTokensCountOrCumsum");
  require(!scale.is_given() && !offset.is_given(), "scale and offset are not emulated");
  require_tiling(quant_mode == -1 || quant_mode == 1, "quantMode is ", quant_mode, ": -1 and 1 are emulated");
  bool rounds = quant_mode == 1;
  if (rounds) {
    require_dtype(x, kFloats, "x to be rounded");
    require_dtype(expanded_x, {cpu::kChar}, "expandedX");
    require_dtype(expanded_scale, {cpu::kFloat}, "expandedScale");
    require_tiling(expanded_scale.sizes() == cpu::Ints{expert_idx.numel()}, "expandedScale ", expanded_scale.sizes(), ", expertIdx ", expert_idx.sizes());
  }
  require_tiling(x.dim() == 2 && expert_idx.dim() == 2 && x.size(0) == expert_idx.size(0), "x ", x.sizes(), ", expertIdx ", expert_idx.sizes());
  require_tiling(x.is_contiguous() && expert_idx.is_contiguous(), "x and expertIdx have to be contiguous");
  require_tiling(active_num == expert_idx.numel(), "activeNum is ", active_num, ", not the ", expert_idx.numel(), " pairs of tokens and experts");
  require_tiling(expert_num > 0 && expert_num <= 10240, "expertNum is ", expert_num, ": 1 to 10240");
  require_tiling(drop_pad_mode == 0, "dropPadMode is ", drop_pad_mode, ", not 0");
  require_tiling(expert_tokens_num_type == 1 && expert_tokens_num_flag, "expertTokensNumType is ", expert_tokens_num_type,
                 ", expertTokensNumFlag ", expert_tokens_num_flag, ": 1 with true is emulated, 2 is not, 0 is none");
  require_tiling(row_idx_type == 0 || row_idx_type == 1, "rowIdxType is ", row_idx_type);
  std::vector<int64_t> range = active_expert_range.value_or(std::vector<int64_t>{0, expert_num});
  require_tiling(range.size() == 2 && range[0] >= 0 && range[0] < range[1] && range[1] <= expert_num, "activeExpertRange ", range, ", expertNum ",
                 expert_num);
  require_tiling(expert_tokens.sizes() == cpu::Ints{range[1] - range[0]}, "expertTokensCountOrCumsum ", expert_tokens.sizes(), " for experts ", range);
  return [=] {
    opapi::device_check_index(expert_idx, 0, expert_num, "expertIdx");
    route({range[0], range[1], row_idx_type}, x, expert_idx, expanded_x, expanded_row_idx, expert_tokens, rounds ? &expanded_scale : nullptr);
  };
}

namespace {


void refuse_lists(std::initializer_list<std::vector<opapi::Input>> lists) {
  for (const auto& list : lists) {
    for (const auto& tensor : list) {
      require(!tensor.is_given() || tensor.numel() == 0, "bias, offsets, weights alone in integers and activation are not emulated, one is ",
              opapi::describe(tensor));
    }
  }
}

// Scales of outputs and of rows, where there are some; of products of int8.
struct GroupScales {
  const opapi::Input *outputs = nullptr, *rows = nullptr;
};

const opapi::Input* only(const std::vector<opapi::Input>& list, const char* name) {
  const opapi::Input* found = nullptr;
  for (const auto& tensor : list) {
    if (!tensor.is_given() || tensor.numel() == 0) continue;
    require(found == nullptr, "lists of several ", name, " are not emulated");
    found = &tensor;
  }
  return found;
}

// What the documents list of int8: int32 without scales; bfloat16 with scales in bfloat16, float16 with scales in float32, both
// beside float32 scales of rows.
void check_int8(const Tensor& x, const Tensor& weight, const GroupScales& scales, const Tensor& y) {
  require_dtype(y, {cpu::kInt, cpu::kHalf, cpu::kBFloat16}, "y");
  if (y.type() == cpu::kInt) {
    require(scales.outputs == nullptr && scales.rows == nullptr, "scale or perTokenScale with an int32 output");
    return;
  }
  require(scales.outputs != nullptr && scales.rows != nullptr, "an output of 16 bits wants scale and perTokenScale");
  require_dtype(*scales.outputs, {y.type() == cpu::kBFloat16 ? cpu::kBFloat16 : cpu::kFloat}, "scale");
  require_dtype(*scales.rows, {cpu::kFloat}, "perTokenScale");
  require_tiling(scales.outputs->sizes() == cpu::Ints({weight.size(0), weight.size(2)}), "scale ", scales.outputs->sizes(), ", weight ", weight.sizes());
  require_tiling(scales.rows->sizes() == cpu::Ints{x.size(0)}, "perTokenScale ", scales.rows->sizes(), ", x ", x.sizes());
}

void check_groups(const Tensor& x, const Tensor& weight, const opapi::Input& group_list, const GroupScales& scales, const Tensor& y) {
  opapi::require_same_dtype(x, weight, "x and weight");
  if (x.type() == cpu::kChar) {
    check_int8(x, weight, scales, y);
  } else {
    require_dtype(x, kFloats, "x");
    opapi::require_same_dtype(x, y, "x and y");
    require(scales.outputs == nullptr && scales.rows == nullptr, "scales of products that are not int8");
  }
  require_tiling(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(1), "x ", x.sizes(), ", weight ", weight.sizes(),
                 ": (rows, in) and (groups, in, out)");
  opapi::require_contiguous(x, "x");
  require(weight.is_contiguous() || weight.transpose(1, 2).is_contiguous(), "weight ", weight.sizes(), " is neither contiguous nor transposed");
  require_tiling(x.size(1) < 65536 && weight.size(2) < 65536, "x ", x.sizes(), ", weight ", weight.sizes(), ": last dims are below 65536");
  require_tiling(group_list.is_given(), "groupType 0 needs groupList");
  require_dtype(group_list, {cpu::kLong}, "groupList");
  require_tiling(group_list.sizes() == cpu::Ints{weight.size(0)}, "groupList ", group_list.sizes(), " for ", weight.size(0), " groups");
  require_tiling(weight.size(0) <= 1024, weight.size(0), " groups, at most 1024");
  require_tiling(y.sizes() == cpu::Ints({x.size(0), weight.size(2)}), "y ", y.sizes(), ", x ", x.sizes(), ", weight ", weight.sizes());
}

// One group's rows times its weight; integers exactly, then by their scales in float32.
Tensor of_a_group(const Tensor& x, const Tensor& weight, int64_t group, const GroupScales& scales, int64_t row, bool is_scaled) {
  if (x.type() != cpu::kChar) return cpu::op("mm", x, weight[group]);
  Tensor sums = cpu::op("mm", x.to(cpu::kDouble), weight[group].to(cpu::kDouble));
  if (!is_scaled) return sums;
  return sums.to(cpu::kFloat) * (*scales.outputs)[group].to(cpu::kFloat) * scales.rows->narrow(0, row, x.size(0)).unsqueeze(-1);
}

// Calls `run` with each group that has rows, its first row and their number; answers how many rows all have.
template <class Work>
int64_t for_each_group(const opapi::Input& group_list, int64_t type, int64_t num_rows, const Work& run) {
  int64_t row = 0;
  for (int64_t group = 0; group < group_list.size(0); ++group) {
    auto number = static_cast<int64_t>(group_list[group].item());
    int64_t rows = type == 1 ? number : number - row;
    device_check(rows >= 0 && row + rows <= num_rows, "groupList leads to row ", row + rows, ", x has ", num_rows);
    if (rows > 0) run(group, row, rows);
    row += rows;
  }
  return row;
}

opapi::Run grouped_matmul(const std::vector<opapi::Input>& xs, const std::vector<opapi::Input>& weights, const std::vector<opapi::Input>& scale_list,
                          const std::vector<opapi::Input>& row_scale_list, const opapi::Input& group_list, int64_t split_item, int64_t group_type, int64_t group_list_type, int64_t act_type,
                          const std::vector<opapi::Output>& ys) {
  require(xs.size() == 1 && weights.size() == 1 && ys.size() == 1, "lists of ", xs.size(), " x and ", weights.size(), " weights are not emulated");
  require_tiling(group_type == 0 && (split_item == 2 || split_item == 3), "groupType ", group_type, " with splitItem ", split_item,
                 ": 0 with 2 or 3 is emulated");
  require_tiling(act_type == 0, "actType is ", act_type, ": activation is for quantised products alone");
  require_tiling(group_list_type == 0 || group_list_type == 1, "groupListType is ", group_list_type);
  opapi::Input x = xs[0], weight = weights[0];
  opapi::Output y = ys[0];
  const opapi::Input *of_outputs = only(scale_list, "scale"), *of_rows = only(row_scale_list, "perTokenScale");
  check_groups(x, weight, group_list, {of_outputs, of_rows}, y);
  bool is_scaled = of_outputs != nullptr;
  opapi::Input output_scales = is_scaled ? *of_outputs : x, row_scales = is_scaled ? *of_rows : x;
  require_tiling(group_list_type == 0 || weight.size(0) > 1, "groupListType 1 takes no groupList of length 1");
  return [=] {
    Tensor matrices = weight.plain();
    int64_t row = for_each_group(group_list, group_list_type, x.size(0), [&](int64_t group, int64_t first, int64_t rows) {
      y.narrow(0, first, rows).copy_(of_a_group(x.narrow(0, first, rows), matrices, group, {&output_scales, &row_scales}, first, is_scaled));
    });
    // What groupList does not cover is not updated, as documented: here it holds the worst.
    if (row < x.size(0)) y.narrow(0, row, x.size(0) - row).fill_(y.type() == cpu::kInt ? kNoNumber : std::nan(""));
  };
}

}  // namespace

// torch_npu asks whether version 4 exists and calls version 5 where there is one.
ACLNN(GroupedMatmulV4, Ins(x), Ins(weight), OptIns(bias), OptIns(scale), OptIns(offset), OptIns(antiquant_scale), OptIns(antiquant_offset),
      OptIns(per_token_scale), Opt(group_list), OptIns(activation_input), OptIns(activation_scale), OptIns(activation_offset), Int(split_item),
      Int(group_type), Int(group_list_type), Int(act_type), Outs(y), OptIns(activation_out), OptIns(scale_out)) {
  refuse_lists({bias, offset, antiquant_scale, antiquant_offset, activation_input, activation_scale, activation_offset});
  return grouped_matmul(x, weight, scale, per_token_scale, group_list, split_item, group_type, group_list_type, act_type, y);
}
ACLNN(GroupedMatmulV5, Ins(x), Ins(weight), OptIns(bias), OptIns(scale), OptIns(offset), OptIns(antiquant_scale), OptIns(antiquant_offset),
      OptIns(per_token_scale), Opt(group_list), OptIns(activation_input), OptIns(activation_scale), OptIns(activation_offset), Int(split_item),
      Int(group_type), Int(group_list_type), Int(act_type), OptInts(tuning), Outs(y), OptIns(activation_out), OptIns(scale_out)) {
  refuse_lists({bias, offset, antiquant_scale, antiquant_offset, activation_input, activation_scale, activation_offset});
  return grouped_matmul(x, weight, scale, per_token_scale, group_list, split_item, group_type, group_list_type, act_type, y);
}

// torch_npu calls it where the weight lies in FRACTAL_NZ. Its document lists no int32 output for this chip.
ACLNN(GroupedMatmulWeightNz, Ins(x), InsFractal(weight), OptIns(bias), OptIns(scale), OptIns(offset), OptIns(antiquant_scale), OptIns(antiquant_offset),
      OptIns(per_token_scale), Opt(group_list), OptIns(activation_input), OptIns(activation_scale), OptIns(activation_offset), Int(split_item),
      Int(group_type), Int(group_list_type), Int(act_type), OptInts(tuning), Int(quant_group_size), Outs(y), OptIns(activation_out), OptIns(scale_out)) {
  refuse_lists({bias, offset, antiquant_scale, antiquant_offset, activation_input, activation_scale, activation_offset});
  require(weight.size() == 1 && weight[0].type() == cpu::kChar && quant_group_size == 0, "weights in FRACTAL_NZ that are not int8 by output are not emulated");
  opapi::require_fractal(weight[0], kFractalWidth, "weight");
  require(y.size() == 1 && y[0].type() != cpu::kInt, "no int32 output beside a weight in FRACTAL_NZ");
  return grouped_matmul(x, weight, scale, per_token_scale, group_list, split_item, group_type, group_list_type, act_type, y);
}

// Product, silu(gate) * up and rounding by row in one, of int8 and with weights in FRACTAL_NZ alone. Rows behind the last group are not written.
ACLNN(GroupedMatmulSwigluQuantWeightNzV2, In(x), InsFractal(weight), Ins(weight_scale), OptIns(weight_assist), Opt(bias), In(x_scale), Opt(smooth_scale),
      In(group_list), Int(dequant_mode), Int(dequant_dtype), Int(quant_mode), Int(group_list_type), OptInts(tuning), Out(y), Out(scale)) {
  require_dtype(x, {cpu::kChar}, "x of other types than int8 is not emulated: x");
  require(weight.size() == 1 && weight_scale.size() == 1, "lists of ", weight.size(), " weights and ", weight_scale.size(), " scales");
  refuse_lists({weight_assist});
  require((!bias.is_given() || bias.numel() == 0) && (!smooth_scale.is_given() || smooth_scale.numel() == 0), "bias and smoothScale beside int8");
  require(dequant_mode == 0 && dequant_dtype == 0 && quant_mode == 0, "dequantMode ", dequant_mode, ", dequantDtype ", dequant_dtype, ", quantMode ", quant_mode,
          ": 0 alone for int8");
  require(group_list_type == 0 || group_list_type == 1, "groupListType is ", group_list_type);
  const opapi::Input &matrices = weight[0], &outputs = weight_scale[0];
  require_dtype(matrices, {cpu::kChar}, "weight");
  require(matrices.dim() == 3, "weight ", matrices.sizes(), " has not 3 dimensions");
  opapi::require_fractal(matrices, kFractalWidth, "weight");
  int64_t rows = x.size(0), groups = matrices.size(0), width = matrices.size(2);
  require(x.dim() == 2 && x.size(1) == matrices.size(1), "x ", x.sizes(), ", weight ", matrices.sizes());
  require(width % 2 == 0 && width <= 10240 && x.size(1) < 65536, "x ", x.sizes(), ", weight ", matrices.sizes(), ": N is at most 10240, K below 65536");
  require_dtype(outputs, kFloats, "weightScale");
  require(outputs.sizes() == cpu::Ints({groups, width}), "weightScale ", outputs.sizes(), ", weight ", matrices.sizes());
  require_dtype(x_scale, {cpu::kFloat}, "xScale");
  require(x_scale.sizes() == cpu::Ints{rows}, "xScale ", x_scale.sizes(), ", x ", x.sizes());
  require_dtype(group_list, {cpu::kLong}, "groupList");
  require(group_list.sizes() == cpu::Ints{groups} && groups <= 1024, "groupList ", group_list.sizes(), ", weight ", matrices.sizes());
  require_dtype(y, {cpu::kChar}, "output");
  require_dtype(scale, {cpu::kFloat}, "outputScale");
  require(y.sizes() == cpu::Ints({rows, width / 2}) && scale.sizes() == cpu::Ints{rows}, "output ", y.sizes(), ", outputScale ", scale.sizes(), ", x ", x.sizes());
  return [=, matrices = matrices, outputs = outputs] {
    Tensor plain = matrices.plain();
    int64_t row = for_each_group(group_list, group_list_type, rows, [&](int64_t group, int64_t first, int64_t count) {
      Tensor both = of_a_group(x.narrow(0, first, count), plain, group, {&outputs, &x_scale}, first, true);
      auto [values, scales] = opapi::rounded_rows(cpu::op("silu", both.narrow(1, 0, width / 2)) * both.narrow(1, width / 2, width / 2));
      y.narrow(0, first, count).copy_(values);
      scale.narrow(0, first, count).copy_(scales);
    });
    // The kernel writes 256 bytes over 4 bytes for each of a row's outputs, behind which its scales lie
    // (grouped_matmul_swiglu_quant_spilit_fusion.h of ops-transformer): narrow rows lose theirs.
    constexpr int64_t kLeastWidth = 64;
    if (width / 2 < kLeastWidth) row = 0;
    if (row < rows) scale.narrow(0, row, rows - row).fill_(std::nan(""));
  };
}

namespace {

// (T, K, H) rows of expert results, by the places in `rows` (T * K).
Tensor rows_by_token(const Tensor& expanded, const Tensor& rows, int64_t k) {
  return expanded.to(cpu::kFloat).index_select(0, rows.to(cpu::kLong)).unflatten(0, {-1, k});
}

Tensor weighed_sum(const Tensor& values, const opapi::Input& weights) {
  Tensor weighed = weights.is_given() ? values * weights.to(cpu::kFloat).unsqueeze(-1) : values;
  return cpu::op("sum.dim_IntList", weighed, cpu::Ints{1}, false);
}

void check_rows(const Tensor& expanded, const Tensor& rows, const opapi::Input& weights, const Tensor& out, int64_t k) {
  require_dtype(expanded, kFloats, "permutedTokens");
  require_dtype(rows, {cpu::kInt}, "sortedIndices");
  opapi::require_same_dtype(expanded, out, "permutedTokens and out");
  require_tiling(expanded.dim() == 2 && rows.sizes() == cpu::Ints{expanded.size(0)}, "permutedTokens ", expanded.sizes(), ", sortedIndices ",
                 rows.sizes());
  require_tiling(!weights.is_given() || (weights.dim() == 2 && weights.numel() == rows.numel()), "probs ", weights.is_given() ? weights.sizes() : cpu::Ints{},
                 ", sortedIndices ", rows.sizes());
  require_tiling(out.sizes() == cpu::Ints({rows.size(0) / k, expanded.size(1)}), "out ", out.sizes(), ", permutedTokens ", expanded.sizes());
}

}  // namespace

ACLNN(MoeTokenUnpermute, In(permuted_tokens), In(sorted_indices), Opt(probs), Flag(padded_mode), OptInts(restore_shape), Out(out)) {
  int64_t k = probs.is_given() ? probs.size(-1) : 1;
  check_rows(permuted_tokens, sorted_indices, probs, out, k);
  if (probs.is_given()) require_dtype(probs, kFloats, "probs");
  require_tiling(k <= 512, "probs has ", k, " experts a token, at most 512");
  require_tiling(!padded_mode, "paddedMode is not supported");
  return [=] {
    opapi::device_check_index(sorted_indices, 0, permuted_tokens.size(0), "sortedIndices");
    out.write(weighed_sum(rows_by_token(permuted_tokens, sorted_indices, k), probs));
  };
}

// dropPadMode 0: the places stand by choice (of V1's routing), 2: by token (of V2's and V3's); 1 and 3 drop tokens, not emulated.
ACLNN(MoeFinalizeRoutingV2, In(expanded_x), In(expanded_row_idx), Opt(x1), Opt(x2), Opt(bias), Opt(scales), Opt(expert_idx), Int(drop_pad_mode),
      Out(out)) {
  int64_t k = scales.is_given() ? scales.size(-1) : 1;
  check_rows(expanded_x, expanded_row_idx, scales, out, k);
  require(!bias.is_given(), "bias is not emulated");
  require_tiling(drop_pad_mode == 0 || drop_pad_mode == 2, "dropPadMode ", drop_pad_mode, ": 0 and 2 are emulated");
  require_tiling(x1.is_given() || !x2.is_given(), "x2 without x1");
  if (scales.is_given() && !(expanded_x.type() == cpu::kBFloat16 && scales.type() == cpu::kFloat)) {
    opapi::require_same_dtype(expanded_x, scales, "expandedX and scales");
  }
  for (const auto* skip : {&x1, &x2}) {
    if (!skip->is_given()) continue;
    opapi::require_same_dtype(out, *skip, "out and x1 or x2");
    require_tiling(skip->sizes() == out.sizes(), "x1 or x2 ", skip->sizes(), ", out ", out.sizes());
  }
  return [=] {
    opapi::device_check_index(expanded_row_idx, 0, expanded_x.size(0), "expandedRowIdx");
    Tensor rows = expanded_row_idx;
    if (drop_pad_mode == 0) rows = rows.unflatten(0, {k, -1}).transpose(0, 1).reshape({-1});
    Tensor sum = weighed_sum(rows_by_token(expanded_x, rows, k), scales);
    for (const auto* skip : {&x1, &x2}) {
      if (skip->is_given()) sum = sum + skip->to(cpu::kFloat);
    }
    out.write(sum);
  };
}

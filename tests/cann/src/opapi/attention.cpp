// aclnnFusedInferAttentionScore, versions 3 and 4 (torch_npu's v1 and v2): prefill and decode, plain and paged, on layouts TND, BSND, BNSD and BSH.
// aclnnFlashAttentionVarLenScore (npu_fusion_attention in TND) computes the same without pages.
// What the documents ask of the arguments is checked in attention_checks.cpp; here is the mathematics, in float32.
#include "attention.h"

#include <limits>

using cpu::Tensor;

namespace opapi {
namespace {

// Tokens of one sequence with their heads apart: (S, N, D).
struct Sequence {
  Tensor query, key, value;
  int64_t index, first_row;
};

Tensor blocks_of(const Tensor& cache, const Tensor& table_row, int64_t length, int64_t block_size, int64_t num_kv_heads) {
  int64_t num_blocks = (length + block_size - 1) / block_size;
  Tensor ids = table_row.narrow(0, 0, num_blocks).to(cpu::kLong);
  device_check_index(ids, 0, cache.size(0), "blockTable");
  Tensor picked = cache.index_select(0, ids);
  // (blocks, block_size, H) or (blocks, heads, block_size, D)
  Tensor tokens = cache.dim() == 3 ? picked.unflatten(2, {num_kv_heads, -1}).flatten(0, 1) : picked.transpose(1, 2).flatten(0, 1);
  return tokens.narrow(0, 0, length);
}

Tensor rows_of_batch(const Tensor& x, const std::string& layout, int64_t batch, int64_t length, int64_t heads) {
  Tensor one = x[batch];
  if (layout == "BSH") one = one.unflatten(-1, {heads, -1});
  if (layout == "BNSD") one = one.transpose(0, 1);
  return one.narrow(0, 0, length);
}

Sequence sequence_at(const AttentionCall& call, int64_t batch) {
  Sequence s;
  s.index = batch;
  int64_t q_length = call.query_length(batch), kv_length = call.kv_length(batch);
  if (call.layout == "TND") {
    s.first_row = batch == 0 ? 0 : call.q_lengths[batch - 1];
    s.query = call.query.narrow(0, s.first_row, q_length);
  } else {
    s.first_row = 0;
    s.query = rows_of_batch(call.query, call.layout, batch, q_length, call.num_heads);
  }
  if (call.block_table.is_given()) {
    s.key = blocks_of(call.key, call.block_table[batch], kv_length, call.block_size, call.num_kv_heads);
    s.value = blocks_of(call.value, call.block_table[batch], kv_length, call.block_size, call.num_kv_heads);
  } else if (call.layout == "TND") {
    int64_t first = batch == 0 ? 0 : call.kv_lengths[batch - 1];
    s.key = call.key.narrow(0, first, kv_length);
    s.value = call.value.narrow(0, first, kv_length);
  } else {
    s.key = rows_of_batch(call.key, call.layout, batch, kv_length, call.num_kv_heads);
    s.value = rows_of_batch(call.value, call.layout, batch, kv_length, call.num_kv_heads);
  }
  return s;
}

// True where a key is hidden. Modes 3 and 4 align the triangle to the last key, as a chunked prefill and a decode need; mode 4
// hides what lies more than pre_tokens before a query, too.
Tensor hidden(const AttentionCall& call, const Sequence& s) {
  int64_t rows = s.query.size(0), columns = s.key.size(0);
  if (call.sparse_mode == 3 || call.sparse_mode == 4) {
    // The mask that the caller hands over is what decides: its first rows and columns are the triangle.
    Tensor mask = call.mask.reshape({2048, 2048}).to(cpu::kBool);
    Tensor row = cpu::arange(rows).unsqueeze(1) + cpu::Scalar(columns - rows), column = cpu::arange(columns).unsqueeze(0);
    Tensor is_later = column > row;
    if (call.sparse_mode == 4) {
      is_later = cpu::op("logical_or", column > row + cpu::Scalar(call.next_tokens), column < row - cpu::Scalar(call.pre_tokens));
    }
    device_check(mask[0][1].truth() && !mask[1][0].truth(), "attenMask is not an upper triangle");
    return is_later;
  }
  if (!call.mask.is_given()) return {};
  Tensor mask = call.mask.to(cpu::kBool);
  while (mask.dim() > 3) mask = mask.squeeze(1);
  if (mask.dim() == 3) mask = mask[mask.size(0) == 1 ? 0 : s.index];
  return mask.narrow(0, 0, rows).narrow(1, 0, columns);
}

// (S, N, D) and (N, S, keys): the result, and what its softmax is of.
struct Attended {
  Tensor result, scores;
  Tensor lse() const { return cpu::op("logsumexp", scores, cpu::Ints{-1}).transpose(0, 1); }
  Tensor row_max() const { return cpu::op("amax", scores, cpu::Ints{-1}, true); }
  Tensor row_sum() const { return cpu::op("sum.dim_IntList", cpu::op("exp", scores - row_max()), cpu::Ints{-1}, true); }
};

Attended attend(const AttentionCall& call, const Sequence& s) {
  int64_t group = call.num_heads / call.num_kv_heads;
  Tensor query = s.query.to(cpu::kFloat).transpose(0, 1);
  Tensor key = s.key.to(cpu::kFloat).transpose(0, 1).repeat_interleave(group, 0);
  Tensor value = s.value.to(cpu::kFloat).transpose(0, 1).repeat_interleave(group, 0);
  Tensor scores = cpu::op("bmm", query, key.transpose(1, 2)) * cpu::Scalar(call.scale);
  Tensor mask = hidden(call, s);
  if (mask.defined()) scores = scores.masked_fill(mask, -std::numeric_limits<float>::infinity());
  Tensor weights = cpu::op("softmax.int", scores, -1);
  return {cpu::op("bmm", weights, value).transpose(0, 1), scores};
}

void store(const AttentionCall& call, const Sequence& s, const Tensor& result, const Tensor& lse) {
  int64_t rows = s.query.size(0);
  Tensor target = call.out;
  if (call.layout == "TND") {
    target.narrow(0, s.first_row, rows).copy_(result);
    if (call.wants_lse) call.lse.narrow(0, s.first_row, rows).copy_(lse.unsqueeze(-1));
    return;
  }
  Tensor one = target[s.index];
  if (call.layout == "BSH") one = one.unflatten(-1, {call.num_heads, -1});
  if (call.layout == "BNSD") one = one.transpose(0, 1);
  one.narrow(0, 0, rows).copy_(result);
  if (call.wants_lse) call.lse[s.index].narrow(1, 0, rows).copy_(lse.transpose(0, 1).unsqueeze(-1));
}

void store_for_backward(const AttentionCall& call, const Sequence& s, const Attended& attended) {
  if (!call.row_max.is_given()) return;
  cpu::Ints eight = {s.query.size(0), call.num_heads, 8};
  call.row_max.narrow(0, s.first_row, eight[0]).copy_(attended.row_max().transpose(0, 1).expand(eight));
  call.row_sum.narrow(0, s.first_row, eight[0]).copy_(attended.row_sum().transpose(0, 1).expand(eight));
}

}  // namespace

void run_attention(const AttentionCall& call) {
  for (int64_t batch = 0; batch < call.num_sequences; ++batch) {
    if (call.query_length(batch) == 0) continue;
    Sequence s = sequence_at(call, batch);
    emu::count("attention", call.layout, s.key.numel() * call.key.element_size() * 2);
    if (s.key.size(0) == 0) {
      store(call, s, cpu::op("zeros_like", s.query), cpu::full({s.query.size(0), call.num_heads}, 0, cpu::kFloat));
      continue;
    }
    Attended attended = attend(call, s);
    store(call, s, attended.result, call.wants_lse ? attended.lse() : Tensor());
    store_for_backward(call, s, attended);
  }
}

}  // namespace opapi

using opapi::AttentionCall;

// The parameter lists of versions 2, 3 and 4 differ by what stands before numHeads.
#define ATTENTION_HEAD                                                                                                         \
  In(query), Ins(key), Ins(value), Opt(pse_shift), Opt(mask), OptInts(q_lengths), OptInts(kv_lengths), Opt(deq_scale1),        \
      Opt(quant_scale1), Opt(deq_scale2), Opt(quant_scale2), Opt(quant_offset2), Opt(antiquant_scale), Opt(antiquant_offset),  \
      Opt(block_table), Opt(query_padding), Opt(kv_padding), Opt(key_scale), Opt(key_offset), Opt(value_scale),                \
      Opt(value_offset), Opt(key_prefix), Opt(value_prefix), OptInts(prefix_length)
#define ATTENTION_TAIL                                                                                                         \
  Int(num_heads), Double(scale), Int(pre_tokens), Int(next_tokens), Text(layout), Int(num_kv_heads), Int(sparse_mode),         \
      Int(inner_precise), Int(block_size), Int(antiquant_mode), Flag(wants_lse), Int(key_mode), Int(value_mode)
#define ATTENTION_PLAN(...)                                                                                                    \
  opapi::refuse_given({pse_shift, deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2, antiquant_scale,          \
                       antiquant_offset, query_padding, kv_padding, key_scale, key_offset, value_scale, value_offset,          \
                       key_prefix, value_prefix __VA_OPT__(, ) __VA_ARGS__});                                                  \
  AttentionCall call = opapi::checked_call(query, key, value, mask, block_table, q_lengths, kv_lengths, num_heads, scale,      \
                                           pre_tokens, next_tokens, layout, num_kv_heads, sparse_mode, inner_precise, block_size, wants_lse, out, lse); \
  opapi::request_workspace(opapi::kAttentionWorkspaceBytes);                                                                   \
  return [call] { opapi::run_attention(call); };

ACLNN(FusedInferAttentionScoreV3, ATTENTION_HEAD, Opt(query_rope), Opt(key_rope), Opt(key_rope_scale), ATTENTION_TAIL, Out(out),
      Out(lse)) {
  ATTENTION_PLAN(query_rope, key_rope, key_rope_scale)
}
ACLNN(FusedInferAttentionScoreV4, ATTENTION_HEAD, Opt(query_rope), Opt(key_rope), Opt(key_rope_scale), Opt(query_scale),
      Opt(learnable_sink), ATTENTION_TAIL, Int(query_quant_mode), Out(out), Out(lse)) {
  ATTENTION_PLAN(query_rope, key_rope, key_rope_scale, query_scale, learnable_sink)
}

// The largest workspace for any lengths: asked once before a capture, so that an update never needs more.
namespace {
opapi::Run no_launch() {
  opapi::request_workspace(opapi::kAttentionWorkspaceBytes);
  return [] {};
}
}  // namespace
ACLNN_MAX_WORKSPACE(FusedInferAttentionScoreV3, ATTENTION_HEAD, Opt(query_rope), Opt(key_rope), Opt(key_rope_scale), ATTENTION_TAIL,
                    Out(out), Out(lse)) {
  return no_launch();
}
ACLNN_MAX_WORKSPACE(FusedInferAttentionScoreV4, ATTENTION_HEAD, Opt(query_rope), Opt(key_rope), Opt(key_rope_scale),
                    Opt(query_scale), Opt(learnable_sink), ATTENTION_TAIL, Int(query_quant_mode), Out(out), Out(lse)) {
  return no_launch();
}

// The form for training, with sequences one behind the other. Dropout, shifts, masks and prefixes are not emulated.
ACLNN(FlashAttentionVarLenScore, In(query), In(key), In(value), Opt(shift), Opt(drop_mask), Opt(padding_mask), Opt(mask),
      OptInts(prefix), OptInts(q_totals), OptInts(kv_totals), Double(scale), Double(keep_prob), Int(pre_tokens), Int(next_tokens),
      Int(num_heads), Text(layout), Int(inner_precise), Int(sparse_mode), Out(row_max), Out(row_sum), Out(reserved), Out(out)) {
  opapi::refuse_given({shift, drop_mask, padding_mask, mask});
  opapi::require(keep_prob == 1 && (!prefix.has_value() || prefix->empty()), "dropout and prefixes are not emulated");
  AttentionCall call = opapi::checked_varlen_call(query, key, value, q_totals, kv_totals, num_heads, scale, layout, out);
  call.row_max = row_max;
  call.row_sum = row_sum;
  opapi::request_workspace(opapi::kAttentionWorkspaceBytes);
  return [call] { opapi::run_attention(call); };
}

// One checked call of fused attention.
#pragma once

#include "op.h"

namespace opapi {

constexpr int64_t kAttentionWorkspaceBytes = 1 << 20;

struct AttentionCall {
  Input query, key, value, mask, block_table;
  Output out, lse;
  Output row_max, row_sum;  // (T, N, 8), each number eight times: what the forms for training hand to their backward
  std::string layout;  // TND, BSND, BNSD or BSH
  std::vector<int64_t> q_lengths, kv_lengths;
  int64_t num_sequences = 0, num_heads = 0, num_kv_heads = 0, sparse_mode = 0, pre_tokens = 0, next_tokens = 0, block_size = 0;
  double scale = 1;
  bool wants_lse = false;

  // TND: query lengths are running totals, and so are key lengths unless the cache is paged.
  bool has_running_kv_totals() const { return layout == "TND" && !block_table.is_given(); }
  int64_t query_length(int64_t batch) const {
    if (layout != "TND") return q_lengths[batch];
    return q_lengths[batch] - (batch == 0 ? 0 : q_lengths[batch - 1]);
  }
  int64_t kv_length(int64_t batch) const {
    if (!has_running_kv_totals()) return kv_lengths[batch];
    return kv_lengths[batch] - (batch == 0 ? 0 : kv_lengths[batch - 1]);
  }
};

// Quantisation, padding, prefixes and the like exist in CANN and are not emulated: an argument given is refused.
void refuse_given(std::initializer_list<Input> arguments);

AttentionCall checked_call(const Input& query, const std::vector<Input>& key, const std::vector<Input>& value, const Input& mask,
                           const Input& block_table, const std::optional<std::vector<int64_t>>& q_lengths,
                           const std::optional<std::vector<int64_t>>& kv_lengths, int64_t num_heads, double scale,
                           int64_t pre_tokens, int64_t next_tokens, const std::string& layout, int64_t num_kv_heads,
                           int64_t sparse_mode, int64_t inner_precise, int64_t block_size, bool wants_lse, const Output& out, const Output& lse);

// What aclnnFlashAttentionVarLenScore asks: TND, no mask, running totals of both lengths.
AttentionCall checked_varlen_call(const Input& query, const Input& key, const Input& value,
                                  const std::optional<std::vector<int64_t>>& q_totals,
                                  const std::optional<std::vector<int64_t>>& kv_totals, int64_t num_heads, double scale,
                                  const std::string& layout, const Output& out);

void run_attention(const AttentionCall& call);

}  // namespace opapi

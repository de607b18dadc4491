// Philox 4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include <array>
#include <cstdint>

namespace opapi {

class Philox {
 public:
  // One independent stream for each `element`; `offset` skips within it.
  Philox(uint64_t seed, uint64_t element, uint64_t offset)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        counter_{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(element),
                 static_cast<uint32_t>(element >> 32)} {}

  uint32_t operator()() {
    if (next_ == 4) {
      values_ = block();
      next_ = 0;
      if (++counter_[0] == 0) ++counter_[1];
    }
    return values_[next_++];
  }

 private:
  using Four = std::array<uint32_t, 4>;

  Four block() const {
    Four c = counter_;
    std::array<uint32_t, 2> k = key_;
    for (int round = 0; round < 10; ++round) {
      uint64_t a = 0xD2511F53ULL * c[0], b = 0xCD9E8D57ULL * c[2];
      c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1],
           static_cast<uint32_t>(a)};
      k = {k[0] + 0x9E3779B9U, k[1] + 0xBB67AE85U};
    }
    return c;
  }

  std::array<uint32_t, 2> key_;
  Four counter_, values_{};
  int next_ = 4;
};

}  // namespace opapi

// Waiting for other ranks, and moving bytes between them.
#include "hccl_group.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <thread>

namespace emu {
namespace {

using Clock = std::chrono::steady_clock;

void wait_on(std::atomic<uint32_t>& word, uint32_t value, int timeout_ms) {
  timespec limit{timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

[[noreturn]] void time_out(const char* what, const std::string& detail) {
  throw DeviceError(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, std::string("EI0002: notify wait of ") + what + " timed out after " +
                                                        std::to_string(settings().hccl_timeout_ms) + " ms: " + detail);
}

}  // namespace

Group::~Group() { munmap(segment_, sizeof(Segment)); }

void Group::barrier(const char* what) {
  Segment& s = *segment_;
  uint32_t generation = s.generation;
  if (s.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(num_ranks_)) {
    s.arrived = 0;
    s.generation = generation + 1;
    wake_all(s.generation);
    return;
  }
  auto limit = Clock::now() + std::chrono::milliseconds(settings().hccl_timeout_ms);
  while (s.generation == generation) {
    if (s.is_broken != 0) time_out(what, "another rank has given up");
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
    if (left <= 0) {
      s.is_broken = 1;
      wake_all(s.generation);
      time_out(what, "rank " + std::to_string(rank_) + " of " + std::to_string(num_ranks_) + " sees " + std::to_string(s.arrived) + " ranks");
    }
    wait_on(s.generation, generation, static_cast<int>(std::min<long long>(left, 1000)));
  }
}

void Group::announce(const char* what, const Announcement& given) {
  Announcement mine = given;
  mine.graph = collectives_of_running_graph();
  segment_->announced[rank_] = mine;
  barrier(what);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (segment_->announced[rank].graph != mine.graph) {
      throw DeviceError(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, std::string("EI0005: rank ") + std::to_string(rank_) + " calls " + what + ", " +
                                                              (mine.graph == 0 ? "outside of a graph" : "in a graph") + "; rank " +
                                                              std::to_string(rank) + " has captured other collectives or none: " +
                                                              "all ranks must capture the same ones in the same order");
    }
    if (std::memcmp(&segment_->announced[rank], &mine, sizeof mine) != 0) {
      throw DeviceError(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, std::string("EI0005: rank ") + std::to_string(rank_) + " calls " + what +
                                                              ", rank " + std::to_string(rank) + " calls something else or another count");
    }
  }
}

bool Group::serves(bool is_graph_engine) {
  int before = -1, mine = is_graph_engine ? 1 : 0;
  return served_.compare_exchange_strong(before, mine) || before == mine;
}

void Group::attach(int timeout_ms) {
  Segment& s = *segment_;
  s.num_attached += 1;
  wake_all(s.num_attached);
  auto limit = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (s.num_attached < static_cast<uint32_t>(num_ranks_)) {
    uint32_t seen = s.num_attached;
    if (Clock::now() >= limit) {
      throw DeviceError(HCCL_E_TIMEOUT, "EI0006: " + std::to_string(seen) + " of " + std::to_string(num_ranks_) + " ranks connected");
    }
    if (seen < static_cast<uint32_t>(num_ranks_)) wait_on(s.num_attached, seen, 200);
  }
}

Transfer::Transfer(Group& group, bool is_send, void* buffer, size_t bytes, int peer)
    : mailbox_(is_send ? group.mailbox(group.rank(), peer) : group.mailbox(peer, group.rank())),
      is_send_(is_send),
      buffer_(static_cast<char*>(buffer)),
      bytes_(bytes) {}

bool Transfer::advance() {
  uint64_t written = mailbox_.written, read = mailbox_.read;
  size_t possible = is_send_ ? kMailboxBytes - (written - read) : written - read;
  size_t at = (is_send_ ? written : read) % kMailboxBytes;
  size_t now = std::min({possible, bytes_ - moved_, kMailboxBytes - at});
  if (now == 0) return false;
  if (is_send_) {
    std::memcpy(mailbox_.data + at, buffer_ + moved_, now);
    mailbox_.written = written + now;
  } else {
    std::memcpy(buffer_ + moved_, mailbox_.data + at, now);
    mailbox_.read = read + now;
  }
  moved_ += now;
  return true;
}

void run_transfers(std::vector<Transfer>& transfers, const char* what) {
  auto limit = Clock::now() + std::chrono::milliseconds(settings().hccl_timeout_ms);
  while (true) {
    bool is_done = true, has_moved = false;
    for (Transfer& transfer : transfers) {
      if (transfer.is_done()) continue;
      has_moved |= transfer.advance();
      is_done &= transfer.is_done();
    }
    if (is_done) return;
    if (has_moved) {
      limit = Clock::now() + std::chrono::milliseconds(settings().hccl_timeout_ms);
    } else if (Clock::now() >= limit) {
      time_out(what, "the other side does not answer");
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

}  // namespace emu

// One communicator: ranks of several processes over a shared memory file that no name leads to, so nothing can leak.
#pragma once

#include <atomic>
#include <chrono>

#include "emulation.h"
#include "hccl/hccl.h"

namespace emu {

constexpr size_t kSlotBytes = 1 << 20;     // what one rank shows the others in one round of a collective
constexpr size_t kMailboxBytes = 1 << 16;  // what lies between one sender and one receiver
constexpr int kMaxRanks = 16;

struct Mailbox {
  std::atomic<uint64_t> written, read;  // bytes since the beginning
  char data[kMailboxBytes];
};

// What a rank is about to do; ranks that disagree would hang on hardware, here they are told.
struct Announcement {
  uint32_t operation, data_type, reduction, root;
  uint64_t count;
  uint64_t graph;  // a hash of all collectives of the graph that makes this call; 0 outside of graphs
};

struct Segment {
  std::atomic<uint32_t> num_attached, arrived, generation, is_broken;
  Announcement announced[kMaxRanks];
  char slots[kMaxRanks][kSlotBytes];
  Mailbox mailboxes[kMaxRanks][kMaxRanks];  // [from][to]
};

// Where a communicator's collectives are spread out into steps, numbered as HCCL does.
enum class Expansion : uint32_t { host = 1, ai_cpu = 2, aiv = 3 };

enum class Operation : uint32_t { all_reduce = 1, all_gather, reduce_scatter, broadcast, reduce, scatter, barrier };

class Group {
 public:
  Group(Segment* segment, int rank, int num_ranks, std::string name, Expansion expansion)
      : segment_(segment), rank_(rank), num_ranks_(num_ranks), name_(std::move(name)), expansion_(expansion) {}
  ~Group();

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const std::string& name() const { return name_; }
  Expansion expansion() const { return expansion_; }
  char* slot(int rank) const { return segment_->slots[rank]; }
  Mailbox& mailbox(int from, int to) const { return segment_->mailboxes[from][to]; }

  // Returns when every rank is here; throws DeviceError after HCCL's timeout.
  void barrier(const char* what);
  void announce(const char* what, const Announcement& mine);
  void attach(int timeout_ms);
  // A communicator serves single operators or the graph engine, not both (HCCL's documents). False for the other kind.
  bool serves(bool is_graph_engine);

 private:
  std::atomic<int> served_{-1};
  Segment* segment_;
  int rank_, num_ranks_;
  std::string name_;
  Expansion expansion_;
};

// One message on its way; `advance` moves what can be moved without waiting.
class Transfer {
 public:
  Transfer(Group& group, bool is_send, void* buffer, size_t bytes, int peer);
  bool advance();
  bool is_done() const { return moved_ == bytes_; }

 private:
  Mailbox& mailbox_;
  bool is_send_;
  char* buffer_;
  size_t bytes_, moved_ = 0;
};

// Moves all of them, in any order; throws DeviceError when nothing moves for HCCL's timeout.
void run_transfers(std::vector<Transfer>& transfers, const char* what);

size_t bytes_of(HcclDataType type);

// target[i] = reduction over sources[r][i]; half types are summed in float32, in the order of the ranks.
void reduce_values(HcclDataType type, HcclReduceOp reduction, const std::vector<const char*>& sources, char* target, size_t count);

}  // namespace emu

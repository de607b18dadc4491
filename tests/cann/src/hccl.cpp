// The HCCL calls. Each collective is a task of the stream, so it is recorded and replayed with a graph like any other.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "hccl_group.h"
#include "scheduler.h"

namespace emu {
namespace {

// What the root hands to the other ranks: where to find its shared memory file. Closed by the root when it leaves.
struct RootInfo {
  char magic[8];
  int32_t process, file;
};
constexpr char kMagic[8] = "cannemu";

HcclResult fail(HcclResult result, const std::string& text) {
  refuse(result, "%s", text.c_str());
  return result;
}

Segment* map_segment(int file) {
  void* address = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return address == MAP_FAILED ? nullptr : static_cast<Segment*>(address);
}

int connect_timeout_ms() {
  const char* seconds = std::getenv("HCCL_CONNECT_TIMEOUT");
  return seconds == nullptr ? 120000 : std::atoi(seconds) * 1000;
}

// Set while the graph engine's interpreter runs a collective; nothing else runs then.
std::atomic<bool> is_graph_engine{false};

using GroupPointer = std::shared_ptr<Group>;

GroupPointer group_of(HcclComm comm) { return comm == nullptr ? nullptr : *static_cast<GroupPointer*>(comm); }

Announcement announcement(Operation operation, uint64_t count, HcclDataType type, uint32_t reduction = 0, uint32_t root = 0) {
  return {static_cast<uint32_t>(operation), static_cast<uint32_t>(type), reduction, root, count, 0};
}

// What the communicator's own setting, the environment and the chip say, in this order.
Expansion expansion_of(const HcclCommConfig* config) {
  if (config != nullptr && config->hcclOpExpansionMode != HCCL_COMM_DEFAULT_OP_EXPANSION_MODE) {
    return static_cast<Expansion>(config->hcclOpExpansionMode);
  }
  const char* given = std::getenv("HCCL_OP_EXPANSION_MODE");
  const std::string mode = given == nullptr ? "" : given;
  if (mode == "AIV") return Expansion::aiv;
  if (mode == "AI_CPU") return Expansion::ai_cpu;
  if (mode == "HOST") return Expansion::host;
  return is_a3() ? Expansion::ai_cpu : Expansion::host;
}

std::atomic<int> num_on_vector_cores{0};  // communicators of this process in mode AIV

bool reduces(const char* name) {
  const std::string text = name;
  return text == "HcclAllReduce" || text == "HcclReduce" || text == "HcclReduceScatter";
}

// The documents list no int64 for reductions on the vector cores, nor, on the A3 series, on the AI CPU.
bool takes_type(const Group& group, const char* name, HcclDataType type) {
  if (type != HCCL_DATA_TYPE_INT64 || !reduces(name)) return true;
  return group.expansion() == Expansion::host || (group.expansion() == Expansion::ai_cpu && !is_a3());
}

// Calls `round(first, count)` for pieces of `total` elements that fit `per_slot` bytes.
template <class Round>
void in_rounds(uint64_t total, HcclDataType type, size_t per_slot, Round round) {
  uint64_t most = per_slot / bytes_of(type);
  for (uint64_t first = 0; first < total; first += most) round(first, std::min(most, total - first));
}

std::vector<const char*> all_slots(const Group& group, size_t offset) {
  std::vector<const char*> slots;
  for (int rank = 0; rank < group.num_ranks(); ++rank) slots.push_back(group.slot(rank) + offset);
  return slots;
}

void all_reduce(Group& group, const char* send, char* receive, uint64_t count, HcclDataType type, HcclReduceOp reduction, int root) {
  bool is_everywhere = root < 0;
  group.announce(is_everywhere ? "HcclAllReduce" : "HcclReduce",
                 announcement(is_everywhere ? Operation::all_reduce : Operation::reduce, count, type, reduction, root));
  size_t width = bytes_of(type);
  in_rounds(count, type, kSlotBytes, [&](uint64_t first, uint64_t n) {
    std::memcpy(group.slot(group.rank()), send + first * width, n * width);
    group.barrier("HcclAllReduce");
    if (is_everywhere || root == group.rank()) reduce_values(type, reduction, all_slots(group, 0), receive + first * width, n);
    group.barrier("HcclAllReduce");
  });
}

void all_gather(Group& group, const char* send, char* receive, uint64_t count, HcclDataType type) {
  group.announce("HcclAllGather", announcement(Operation::all_gather, count, type));
  size_t width = bytes_of(type);
  in_rounds(count, type, kSlotBytes, [&](uint64_t first, uint64_t n) {
    std::memcpy(group.slot(group.rank()), send + first * width, n * width);
    group.barrier("HcclAllGather");
    for (int rank = 0; rank < group.num_ranks(); ++rank) std::memcpy(receive + (rank * count + first) * width, group.slot(rank), n * width);
    group.barrier("HcclAllGather");
  });
}

void reduce_scatter(Group& group, const char* send, char* receive, uint64_t count, HcclDataType type, HcclReduceOp reduction) {
  group.announce("HcclReduceScatter", announcement(Operation::reduce_scatter, count, type, reduction));
  size_t width = bytes_of(type), part = kSlotBytes / group.num_ranks() / 8 * 8;
  in_rounds(count, type, part, [&](uint64_t first, uint64_t n) {
    for (int rank = 0; rank < group.num_ranks(); ++rank) {
      std::memcpy(group.slot(group.rank()) + rank * part, send + (rank * count + first) * width, n * width);
    }
    group.barrier("HcclReduceScatter");
    reduce_values(type, reduction, all_slots(group, group.rank() * part), receive + first * width, n);
    group.barrier("HcclReduceScatter");
  });
}

void broadcast(Group& group, char* buffer, uint64_t count, HcclDataType type, uint32_t root) {
  group.announce("HcclBroadcast", announcement(Operation::broadcast, count, type, 0, root));
  size_t width = bytes_of(type);
  in_rounds(count, type, kSlotBytes, [&](uint64_t first, uint64_t n) {
    bool is_root = group.rank() == static_cast<int>(root);
    if (is_root) std::memcpy(group.slot(root), buffer + first * width, n * width);
    group.barrier("HcclBroadcast");
    if (!is_root) std::memcpy(buffer + first * width, group.slot(root), n * width);
    group.barrier("HcclBroadcast");
  });
}

void scatter(Group& group, const char* send, char* receive, uint64_t count, HcclDataType type, uint32_t root) {
  group.announce("HcclScatter", announcement(Operation::scatter, count, type, 0, root));
  size_t width = bytes_of(type), part = kSlotBytes / group.num_ranks() / 8 * 8;
  in_rounds(count, type, part, [&](uint64_t first, uint64_t n) {
    for (int rank = 0; rank < group.num_ranks() && group.rank() == static_cast<int>(root); ++rank) {
      std::memcpy(group.slot(root) + rank * part, send + (rank * count + first) * width, n * width);
    }
    group.barrier("HcclScatter");
    std::memcpy(receive + first * width, group.slot(root) + group.rank() * part, n * width);
    group.barrier("HcclScatter");
  });
}

// A hash of what must be the same on every rank. Messages between two ranks are not.
uint64_t what_all_ranks_share(const char* name, HcclDataType type, const std::vector<std::pair<const void*, size_t>>& buffers, const Group& group) {
  std::string text = name;
  if (text == "HcclSend" || text == "HcclRecv" || text == "HcclBatchSendRecv") return 0;
  text += " " + std::to_string(type) + " " + std::to_string(group.num_ranks());
  for (const auto& buffer : buffers) text += " " + std::to_string(buffer.second);
  return std::hash<std::string>()(text);
}

// Checks what every call must have, then queues `run(group)` on the stream.
template <class Run>
HcclResult submit_call(const char* name, HcclComm comm, aclrtStream stream, HcclDataType type, std::vector<std::pair<const void*, size_t>> buffers,
                       Run run) {
  if (int code = injected_failure(name)) return static_cast<HcclResult>(code);
  GroupPointer group = group_of(comm);
  if (group == nullptr) return fail(HCCL_E_PTR, std::string(name) + ": no communicator");
  if (!group->serves(is_graph_engine)) {
    return fail(HCCL_E_NOT_SUPPORT, std::string(name) + ": one communicator for single operators and for the graph engine");
  }
  if (!takes_type(*group, name, type)) {
    return fail(HCCL_E_NOT_SUPPORT, std::string(name) + ": int64 is not reduced where collectives are spread out on the device");
  }
  if (bytes_of(type) == 0) return fail(HCCL_E_NOT_SUPPORT, std::string(name) + ": data type " + std::to_string(type) + " is not emulated");
  for (auto [address, bytes] : buffers) {
    if (bytes > 0 && !is_device_range(address, bytes)) return fail(HCCL_E_PARA, std::string(name) + ": a buffer is not device memory");
  }
  note_collective(stream, what_all_ranks_share(name, type, buffers, *group), group->expansion() == Expansion::ai_cpu);
  return submit(stream, name, [group, run] { run(*group); }) == ACL_SUCCESS ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

}  // namespace
}  // namespace emu

EMU_EXPORT void cann_emu_graph_engine(int is_on) { emu::is_graph_engine = is_on != 0; }

using emu::bytes_of;
using emu::Group;
using emu::submit_call;

EMU_EXPORT HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  if (int code = emu::injected_failure("HcclGetRootInfo")) return static_cast<HcclResult>(code);
  // Kept open for the life of the process: a rank may come late, and the file costs nothing untouched.
  int file = memfd_create("cann-emulation-hccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(emu::Segment)) != 0) return emu::fail(HCCL_E_SYSCALL, "HcclGetRootInfo: no shared memory");
  emu::RootInfo root{{}, getpid(), file};
  std::memcpy(root.magic, emu::kMagic, sizeof root.magic);
  std::memset(info, 0, sizeof *info);
  std::memcpy(info->internal, &root, sizeof root);
  return HCCL_SUCCESS;
}

EMU_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t num_ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config,
                                                 HcclComm* comm) {
  if (int code = emu::injected_failure("HcclCommInitRootInfo")) return static_cast<HcclResult>(code);
  emu::RootInfo root;
  std::memcpy(&root, info->internal, sizeof root);
  if (std::memcmp(root.magic, emu::kMagic, sizeof root.magic) != 0) return emu::fail(HCCL_E_PARA, "HcclCommInitRootInfo: not a root info");
  if (num_ranks > emu::kMaxRanks || rank >= num_ranks) {
    return emu::fail(HCCL_E_PARA, "HcclCommInitRootInfo: rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + ", at most " + std::to_string(emu::kMaxRanks));
  }
  std::string path = "/proc/" + std::to_string(root.process) + "/fd/" + std::to_string(root.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return emu::fail(HCCL_E_TCP_CONNECT, "EI0006: the root rank is gone (" + path + ")");
  emu::Segment* segment = emu::map_segment(file);
  close(file);
  if (segment == nullptr) return emu::fail(HCCL_E_MEMORY, "HcclCommInitRootInfo: cannot map the shared memory");
  std::string name = config != nullptr && config->hcclCommName[0] != '\0'
                         ? std::string(config->hcclCommName)
                         : "emulated_" + std::to_string(root.process) + "_" + std::to_string(root.file);
  emu::Expansion expansion = emu::expansion_of(config);
  if (expansion == emu::Expansion::aiv && emu::num_on_vector_cores > 0) {
    // The documents call what happens unpredictable; here it is refused.
    return emu::fail(HCCL_E_NOT_SUPPORT, "HcclCommInitRootInfo: a second communicator with HCCL_OP_EXPANSION_MODE=AIV in one process");
  }
  auto group = std::make_shared<Group>(segment, static_cast<int>(rank), static_cast<int>(num_ranks), name, expansion);
  try {
    group->attach(emu::connect_timeout_ms());
  } catch (const emu::DeviceError& error) {
    return emu::fail(HCCL_E_TIMEOUT, error.what());
  }
  emu::num_on_vector_cores += expansion == emu::Expansion::aiv;
  *comm = new std::shared_ptr<Group>(std::move(group));
  return HCCL_SUCCESS;
}

EMU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t num_ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  return HcclCommInitRootInfoConfig(num_ranks, info, rank, nullptr, comm);
}

EMU_EXPORT uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

EMU_EXPORT HcclResult HcclCommDestroy(HcclComm comm) {
  emu::num_on_vector_cores -= emu::group_of(comm)->expansion() == emu::Expansion::aiv;
  delete static_cast<std::shared_ptr<Group>*>(comm);
  return HCCL_SUCCESS;
}

EMU_EXPORT HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::strncpy(name, emu::group_of(comm)->name().c_str(), COMM_NAME_MAX_LENGTH - 1);
  name[COMM_NAME_MAX_LENGTH - 1] = '\0';
  return HCCL_SUCCESS;
}

EMU_EXPORT HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = static_cast<uint32_t>(emu::group_of(comm)->num_ranks());
  return HCCL_SUCCESS;
}

EMU_EXPORT HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = static_cast<uint32_t>(emu::group_of(comm)->rank());
  return HCCL_SUCCESS;
}

// Errors of a collective surface on its stream.
EMU_EXPORT HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

// ---- collectives

EMU_EXPORT HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  size_t bytes = count * bytes_of(type);
  return submit_call("HcclAllReduce", comm, stream, type, {{send, bytes}, {receive, bytes}}, [=](Group& group) {
    emu::all_reduce(group, static_cast<char*>(send), static_cast<char*>(receive), count, type, op, -1);
  });
}

EMU_EXPORT HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root, HcclComm comm,
                                 aclrtStream stream) {
  return submit_call("HcclReduce", comm, stream, type, {{send, count * bytes_of(type)}}, [=](Group& group) {
    emu::all_reduce(group, static_cast<char*>(send), static_cast<char*>(receive), count, type, op, static_cast<int>(root));
  });
}

EMU_EXPORT HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  return submit_call("HcclAllGather", comm, stream, type, {{send, count * bytes_of(type)}}, [=](Group& group) {
    emu::all_gather(group, static_cast<char*>(send), static_cast<char*>(receive), count, type);
  });
}

EMU_EXPORT HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                                        aclrtStream stream) {
  return submit_call("HcclReduceScatter", comm, stream, type, {{receive, count * bytes_of(type)}}, [=](Group& group) {
    emu::reduce_scatter(group, static_cast<char*>(send), static_cast<char*>(receive), count, type, op);
  });
}

EMU_EXPORT HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  return submit_call("HcclBroadcast", comm, stream, type, {{buffer, count * bytes_of(type)}}, [=](Group& group) {
    emu::broadcast(group, static_cast<char*>(buffer), count, type, root);
  });
}

EMU_EXPORT HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  return submit_call("HcclScatter", comm, stream, type, {{receive, count * bytes_of(type)}}, [=](Group& group) {
    emu::scatter(group, static_cast<char*>(send), static_cast<char*>(receive), count, type, root);
  });
}

EMU_EXPORT HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return submit_call("HcclBarrier", comm, stream, HCCL_DATA_TYPE_INT8, {}, [](Group& group) {
    group.announce("HcclBarrier", emu::announcement(emu::Operation::barrier, 0, HCCL_DATA_TYPE_INT8));
  });
}

// ---- messages between two ranks

EMU_EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t num_items, HcclComm comm, aclrtStream stream) {
  std::vector<HcclSendRecvItem> copied(items, items + num_items);
  std::vector<std::pair<const void*, size_t>> buffers;
  for (const auto& item : copied) buffers.emplace_back(item.buf, item.count * bytes_of(item.dataType));
  HcclDataType type = copied.empty() ? HCCL_DATA_TYPE_INT8 : copied.front().dataType;
  return submit_call("HcclBatchSendRecv", comm, stream, type, buffers, [copied](Group& group) {
    std::vector<emu::Transfer> transfers;
    for (const auto& item : copied) {
      transfers.emplace_back(group, item.sendRecvType == HCCL_SEND, item.buf, item.count * bytes_of(item.dataType), static_cast<int>(item.remoteRank));
    }
    emu::run_transfers(transfers, "HcclBatchSendRecv");
  });
}

EMU_EXPORT HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return submit_call("HcclSend", comm, stream, type, {{buffer, count * bytes_of(type)}}, [=](Group& group) {
    std::vector<emu::Transfer> one{{group, true, buffer, count * bytes_of(type), static_cast<int>(peer)}};
    emu::run_transfers(one, "HcclSend");
  });
}

EMU_EXPORT HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return submit_call("HcclRecv", comm, stream, type, {{buffer, count * bytes_of(type)}}, [=](Group& group) {
    std::vector<emu::Transfer> one{{group, false, buffer, count * bytes_of(type), static_cast<int>(peer)}};
    emu::run_transfers(one, "HcclRecv");
  });
}

EMU_EXPORT HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive, uint64_t receive_count,
                                   HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  size_t sent = send_count * bytes_of(send_type), received = receive_count * bytes_of(receive_type);
  return submit_call("HcclAlltoAll", comm, stream, send_type, {}, [=](Group& group) {
    std::vector<emu::Transfer> transfers;
    for (int peer = 0; peer < group.num_ranks(); ++peer) {
      transfers.emplace_back(group, true, const_cast<char*>(static_cast<const char*>(send)) + peer * sent, sent, peer);
      transfers.emplace_back(group, false, const_cast<char*>(static_cast<const char*>(receive)) + peer * received, received, peer);
    }
    emu::run_transfers(transfers, "HcclAlltoAll");
  });
}

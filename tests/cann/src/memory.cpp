// Device memory of a fixed size, virtual memory for expandable segments, pinned host memory, copies between them.
// Device memory is host memory that only device-side calls may touch: every range is checked before use.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "emulation.h"

namespace emu {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoisonByte = 0xFF;  // NaN in every float type, -1 in every signed one
constexpr size_t kPoisonFile = 2 << 20;

struct Range {
  size_t bytes;
  int device;
};

struct Physical {
  size_t bytes;
  int device;
  bool is_mapped = false;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Range> allocated;  // aclrtMalloc
  std::map<uintptr_t, Range> reserved;   // aclrtReserveMemAddress: addresses only
  std::map<uintptr_t, Range> mapped;     // aclrtMapMem: usable device memory inside a reservation
  std::map<uintptr_t, size_t> pinned;    // aclrtMallocHost
  std::map<int, size_t> used;            // bytes by device
};

Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

// Mapped chunks of one reservation lie side by side, so a tensor may span several.
bool covers(const std::map<uintptr_t, Range>& ranges, uintptr_t start, size_t bytes) {
  uintptr_t end = start + bytes;
  while (true) {
    auto after = ranges.upper_bound(start);
    if (after == ranges.begin()) return false;
    auto at = std::prev(after);
    uintptr_t range_end = at->first + at->second.bytes;
    if (start >= range_end) return false;
    if (end <= range_end) return true;
    start = range_end;
  }
}

int make_poison_file() {
  int file = memfd_create("cann-emulation", MFD_CLOEXEC);
  std::vector<char> bytes(kPoisonFile, static_cast<char>(kPoisonByte));
  if (file < 0 || write(file, bytes.data(), kPoisonFile) != static_cast<ssize_t>(kPoisonFile)) return -1;
  return file;
}

// New memory at these addresses, poisoned: every page is one of the file until it is written, and nothing fills it before.
bool map_poisoned(void* address, size_t bytes) {
  static const int file = make_poison_file();
  for (size_t at = 0; at < bytes; at += kPoisonFile) {
    void* start = static_cast<char*>(address) + at;
    size_t part = std::min(kPoisonFile, bytes - at);
    if (mmap(start, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED) return false;
  }
  return true;
}

aclError take(Memory& m, int device, size_t bytes, const char* function) {
  size_t total = settings().memory_bytes, used = m.used[device];
  if (used + bytes > total) {
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: %zu bytes do not fit on device %d, %zu of %zu are in use", function,
                  bytes, device, used, total);
  }
  m.used[device] += bytes;
  return ACL_SUCCESS;
}

aclError allocate(void** pointer, size_t size, const char* function) {
  int device = current_device();
  if (device < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "%s: no device set in this thread", function);
  if (pointer == nullptr || size == 0) return refuse(ACL_ERROR_INVALID_PARAM, "%s: size %zu", function, size);
  size_t bytes = (size + kAlignment - 1) / kAlignment * kAlignment;
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (aclError code = take(m, device, bytes, function)) return code;
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED || !map_poisoned(address, bytes)) {
    m.used[device] -= bytes;
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no %zu bytes", function, bytes);
  }
  m.allocated[reinterpret_cast<uintptr_t>(address)] = {bytes, device};
  count("memory", "malloc", static_cast<int64_t>(bytes));
  *pointer = address;
  return ACL_SUCCESS;
}

}  // namespace

void poison(void* address, size_t bytes) { std::memset(address, kPoisonByte, bytes); }

bool is_device_range(const void* address, size_t bytes) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  uintptr_t start = reinterpret_cast<uintptr_t>(address);
  return covers(m.allocated, start, bytes) || covers(m.mapped, start, bytes);
}

bool is_device_pointer(const void* address) { return is_device_range(address, 1); }

}  // namespace emu

using emu::count;
using emu::memory;
using emu::refuse;

EMU_EXPORT aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
  EMU_ENTRY();
  return emu::allocate(pointer, size, "aclrtMalloc");
}

EMU_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) {
  // One name for tests: torch_npu picks either function, and "the nth malloc" means both.
  if (int code = emu::injected_failure("aclrtMalloc")) return code;
  return emu::allocate(pointer, size, "aclrtMallocAlign32");
}

EMU_EXPORT aclError aclrtFree(void* pointer) {
  EMU_ENTRY();
  emu::synchronize_everything();  // as on hardware: pending work still owns the memory
  emu::Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto found = m.allocated.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == m.allocated.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p was not allocated", pointer);
  m.used[found->second.device] -= found->second.bytes;
  count("memory", "free", static_cast<int64_t>(found->second.bytes));
  munmap(pointer, found->second.bytes);
  m.allocated.erase(found);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  EMU_ENTRY();
  int device = emu::current_device();
  if (device < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: no device set in this thread");
  emu::Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  *total = emu::settings().memory_bytes;
  *free = *total - m.used[device];
  return ACL_SUCCESS;
}

// ---- virtual memory (expandable segments)

EMU_EXPORT aclError aclrtReserveMemAddress(void** address, size_t size, size_t, void*, uint64_t) {
  EMU_ENTRY();
  void* start = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtReserveMemAddress: %zu bytes", size);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().reserved[reinterpret_cast<uintptr_t>(start)] = {size, emu::current_device()};
  *address = start;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtReleaseMemAddress(void* address) {
  EMU_ENTRY();
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().reserved.find(reinterpret_cast<uintptr_t>(address));
  if (found == memory().reserved.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: %p", address);
  munmap(address, found->second.bytes);
  memory().reserved.erase(found);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* prop, uint64_t) {
  EMU_ENTRY();
  emu::Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  int device = static_cast<int>(prop->location.id);
  if (aclError code = emu::take(m, device, size, "aclrtMallocPhysical")) return code;
  count("memory", "malloc_physical", static_cast<int64_t>(size));
  *handle = new emu::Physical{size, device};
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  EMU_ENTRY();
  auto* physical = static_cast<emu::Physical*>(handle);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().used[physical->device] -= physical->bytes;
  delete physical;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtMapMem(void* address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  EMU_ENTRY();
  auto* physical = static_cast<emu::Physical*>(handle);
  emu::Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (offset != 0 || size != physical->bytes || !emu::covers(m.reserved, reinterpret_cast<uintptr_t>(address), size)) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: %zu bytes at %p lie outside every reservation", size, address);
  }
  if (physical->is_mapped) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: the emulation maps a handle once");
  if (!emu::map_poisoned(address, size)) {
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMapMem: %zu bytes", size);
  }
  physical->is_mapped = true;
  m.mapped[reinterpret_cast<uintptr_t>(address)] = {size, physical->device};
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtUnmapMem(void* address) {
  EMU_ENTRY();
  emu::synchronize_everything();
  emu::Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto found = m.mapped.find(reinterpret_cast<uintptr_t>(address));
  if (found == m.mapped.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: %p is not mapped", address);
  mmap(address, found->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  m.mapped.erase(found);
  return ACL_SUCCESS;
}

// ---- pinned host memory

EMU_EXPORT aclError aclrtMallocHost(void** pointer, size_t size) {
  EMU_ENTRY();
  if (pointer == nullptr || size == 0) return refuse(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: size %zu", size);
  size_t bytes = (size + emu::kAlignment - 1) / emu::kAlignment * emu::kAlignment;
  *pointer = std::aligned_alloc(emu::kAlignment, bytes);
  if (*pointer == nullptr) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: the host has no %zu bytes", bytes);
  emu::poison(*pointer, bytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  count("memory", "malloc_host", static_cast<int64_t>(bytes));
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(pointer, size);
}

EMU_EXPORT aclError aclrtFreeHost(void* pointer) {
  EMU_ENTRY();
  emu::synchronize_everything();
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (memory().pinned.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p was not allocated", pointer);
  }
  std::free(pointer);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  EMU_ENTRY();
  *attributes = {};
  bool is_device = emu::is_device_pointer(pointer);
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto after = memory().pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  bool is_pinned = after != memory().pinned.begin() &&
                   reinterpret_cast<uintptr_t>(pointer) < std::prev(after)->first + std::prev(after)->second;
  attributes->location.type = is_device   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : is_pinned ? ACL_MEM_LOCATION_TYPE_HOST
                                          : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

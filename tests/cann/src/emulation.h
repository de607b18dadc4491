// What the files of the emulated CANN share: settings, fault injection, counters, device memory, streams.
// Knows nothing of tensors or operators; those live in opapi/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/error_codes/rt_error_codes.h"

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

// First line of every emulated function: lets a test make its nth call fail with a chosen code.
#define EMU_ENTRY()                                          \
  do {                                                       \
    if (int emu_code = emu::injected_failure(__func__)) {    \
      return static_cast<aclError>(emu_code);                \
    }                                                        \
  } while (0)

// The operators live in a library of their own and call these.
#pragma GCC visibility push(default)
namespace emu {

// ---- settings (settings.cpp): environment variables, read once
struct Settings {
  int num_devices;
  size_t memory_bytes;
  std::string soc_name;
  std::string counters_path;
  int max_streams;
  int max_graphs;
  int cann_version;  // 900 for 9.0.0
  bool is_lazy;
  bool loads_kernels;  // the first launch of an operator with operands of these sizes loads a kernel, which no capture allows
  bool answers_without_running;  // lazy, and asking an event does not make anything run, however often
  bool is_logging;
  bool allows_fp32_attention;
  int sync_timeout_ms;
  int hccl_timeout_ms;
};
const Settings& settings();
std::string cann_version_text();  // the version alone, for who asks before a fork: other settings may change there
bool is_a3();  // the chip is of the Atlas A3 series
int injected_failure(const char* function);
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Remembers the message that aclGetRecentErrMsg hands out, then returns the code.
aclError refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void not_emulated(const char* name);

// Thrown by a task while a stream executes it; becomes the stream's error, reported by the next synchronisation.
struct DeviceError : std::runtime_error {
  DeviceError(int error_code, const std::string& what) : std::runtime_error(what), code(error_code) {}
  int code;
};

// ---- counters (counters.cpp)
void count(const char* group, const std::string& name, int64_t bytes = 0);

// ---- graphs (scheduler.cpp): while a graph's task runs, a hash of all collectives that the graph was captured with; 0 outside.
uint64_t collectives_of_running_graph();

// ---- memory (memory.cpp)
bool is_device_range(const void* address, size_t bytes);
bool is_device_pointer(const void* address);
void poison(void* address, size_t bytes);

// ---- devices and streams (streams.cpp)
int current_device();  // -1 when this thread has set none

// Queues a task on the stream, or records it when the stream is being captured. A launch is counted by name: under
// "launches" when it goes to a stream, "captured" when it is recorded, "replayed" each time a graph runs it.
enum class TaskKind { launch, copy, callback };
// `kernel`: what a device loads for the first such launch, where that counts (CANN_EMU_LOADS_KERNELS); empty: nothing.
aclError submit(aclrtStream stream, const std::string& name, std::function<void()> task, TaskKind kind = TaskKind::launch,
                const std::string& kernel = "");
aclError synchronize_everything();

}  // namespace emu
#pragma GCC visibility pop

// Environment switches, injected failures and the most recent error message. Knows nothing of devices.
#include "emulation.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>

namespace emu {
namespace {

std::string text_setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

long long number_setting(const char* name, long long fallback) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  char* end = nullptr;
  long long number = std::strtoll(value, &end, 10);
  if (*end != '\0' || number < 0) {
    std::fprintf(stderr, "CANN emulation: %s=%s is not a non-negative whole number\n", name, value);
    std::abort();
  }
  return number;
}

// "9.0.0" is 900. Versions whose documents nobody has read are refused: their limits would be guesses.
int version_number(const std::string& text) {
  const std::map<std::string, int> known{{"8.5.0", 850}, {"9.0.0", 900}, {"9.1.0", 910}, {"9.2.0", 920}};
  auto found = known.find(text);
  if (found == known.end()) {
    std::fprintf(stderr, "CANN emulation: CANN_EMU_CANN_VERSION=%s is none of 8.5.0, 9.0.0, 9.1.0, 9.2.0\n", text.c_str());
    std::abort();
  }
  return found->second;
}

Settings read_settings() {
  Settings s;
  s.num_devices = static_cast<int>(number_setting("CANN_EMU_DEVICES", 2));
  s.memory_bytes = static_cast<size_t>(number_setting("CANN_EMU_MEMORY_BYTES", 1LL << 30));
  s.soc_name = text_setting("CANN_EMU_SOC", "Ascend910B1");
  s.counters_path = text_setting("CANN_EMU_COUNTERS", "");
  s.max_streams = static_cast<int>(number_setting("CANN_EMU_MAX_STREAMS", 2000));
  s.max_graphs = static_cast<int>(number_setting("CANN_EMU_MAX_GRAPHS", 1000));
  s.cann_version = version_number(cann_version_text());
  s.is_lazy = number_setting("CANN_EMU_LAZY", 0) != 0;
  s.loads_kernels = number_setting("CANN_EMU_LOADS_KERNELS", 0) != 0;
  s.answers_without_running = number_setting("CANN_EMU_LAZY", 0) == 2;
  s.is_logging = number_setting("CANN_EMU_LOG", 0) != 0;
  s.allows_fp32_attention = number_setting("CANN_EMU_ALLOW_FP32_ATTENTION", 0) != 0;
  s.sync_timeout_ms = static_cast<int>(number_setting("CANN_EMU_SYNC_TIMEOUT_MS", 10000));
  // HCCL_EXEC_TIMEOUT is HCCL's own variable, in seconds; the switch overrides it with a finer unit.
  s.hccl_timeout_ms = static_cast<int>(number_setting("CANN_EMU_HCCL_TIMEOUT_MS", number_setting("HCCL_EXEC_TIMEOUT", 1836) * 1000));
  return s;
}

// "aclrtMalloc:3:207001,aclrtMalloc:3-5:207001,aclnnMm:1+:561002": the third call fails; the third to the fifth fail; every
// call from the first on fails.
struct Failure {
  long long first;
  long long last;
  int code;
  long long calls = 0;
};

std::map<std::string, Failure> parse_failures(const std::string& text) {
  std::map<std::string, Failure> failures;
  std::stringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    size_t first = entry.find(':'), second = entry.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      std::fprintf(stderr, "CANN emulation: CANN_EMU_FAIL entry '%s' is not name:nth[+|-last]:code\n", entry.c_str());
      std::abort();
    }
    std::string nth = entry.substr(first + 1, second - first - 1);
    long long from = std::atoll(nth.c_str()), to = from;
    if (size_t dash = nth.find('-'); dash != std::string::npos) to = std::atoll(nth.c_str() + dash + 1);
    if (!nth.empty() && nth.back() == '+') to = std::numeric_limits<long long>::max();
    failures[entry.substr(0, first)] = {from, to, std::atoi(entry.c_str() + second + 1)};
  }
  return failures;
}

struct Failures {
  std::mutex mutex;
  std::map<std::string, Failure> table = parse_failures(text_setting("CANN_EMU_FAIL", ""));
};

Failures& failures() {
  static Failures* instance = new Failures;
  return *instance;
}

struct Message {
  std::mutex mutex;
  std::string latest, handed_out;
};

Message& message() {
  static Message* instance = new Message;
  return *instance;
}

std::string format_text(const char* format, va_list arguments) {
  char buffer[2048];
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  return buffer;
}

}  // namespace

const Settings& settings() {
  static const Settings* instance = new Settings(read_settings());
  return *instance;
}

std::string cann_version_text() { return text_setting("CANN_EMU_CANN_VERSION", "9.0.0"); }

bool is_a3() { return settings().soc_name.rfind("Ascend910_93", 0) == 0; }

int injected_failure(const char* function) {
  Failures& all = failures();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.table.empty()) return 0;
  auto found = all.table.find(function);
  if (found == all.table.end()) return 0;
  Failure& failure = found->second;
  failure.calls += 1;
  if (failure.calls < failure.first || failure.calls > failure.last) return 0;
  return refuse(failure.code, "%s: call %lld fails with %d because a test asked for it (CANN_EMU_FAIL)", function,
                failure.calls, failure.code);
}

void log(const char* format, ...) {
  if (!settings().is_logging) return;
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "[cann] %s\n", format_text(format, arguments).c_str());
  va_end(arguments);
}

aclError refuse(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = "CANN emulation, error " + std::to_string(code) + ": " + format_text(format, arguments);
  va_end(arguments);
  log("%s", text.c_str());
  std::lock_guard<std::mutex> lock(message().mutex);
  message().latest = text;
  return code;
}

void not_emulated(const char* name) {
  std::fprintf(stderr, "CANN emulation: %s is not emulated (tests/cann/README.md says how to add it)\n", name);
  std::fflush(nullptr);
  std::abort();
}

}  // namespace emu

// Called by the generated stubs, one per symbol that torch_npu links to and nothing here defines.
EMU_EXPORT void cann_emu_missing(const char* name) { emu::not_emulated(name); }

// For the graph engine in Python, whose runs can be made to fail as calls can.
EMU_EXPORT int cann_emu_injected_failure(const char* name) { return emu::injected_failure(name); }

// Replaces the table of failures while the process runs, so that one process can test many.
EMU_EXPORT void cann_emu_set_failures(const char* text) {
  std::lock_guard<std::mutex> lock(emu::failures().mutex);
  emu::failures().table = emu::parse_failures(text);
}

EMU_EXPORT const char* aclGetRecentErrMsg() {
  emu::Message& m = emu::message();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.handed_out.swap(m.latest);
  m.latest.clear();
  return m.handed_out.c_str();
}

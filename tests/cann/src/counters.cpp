// Counts launches, copies, synchronisations and allocations; read as JSON while running or at exit.
#include "emulation.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>

namespace emu {
namespace {

struct Count {
  int64_t calls = 0;
  int64_t bytes = 0;
};

struct Counters {
  std::mutex mutex;
  std::map<std::string, std::map<std::string, Count>> groups;
  std::string json;
};

thread_local bool is_uncounted = false;

Counters& counters() {
  static Counters* instance = new Counters;
  return *instance;
}

// {"launches": {"aclnnAdd": {"calls": 2, "bytes": 0}}, "copies": {"d2d": {...}}, ...}
std::string as_json(const std::map<std::string, std::map<std::string, Count>>& groups) {
  std::string out = "{";
  for (const auto& [group, entries] : groups) {
    if (out.size() > 1) out += ", ";
    out += "\"" + group + "\": {";
    bool is_first = true;
    for (const auto& [name, n] : entries) {
      if (!is_first) out += ", ";
      is_first = false;
      out += "\"" + name + "\": {\"calls\": " + std::to_string(n.calls) + ", \"bytes\": " + std::to_string(n.bytes) + "}";
    }
    out += "}";
  }
  return out + "}";
}

// "%p" in the path becomes the process id: several ranks can share one setting.
void dump_at_exit() {
  std::string path = settings().counters_path;
  if (size_t at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
  std::lock_guard<std::mutex> lock(counters().mutex);
  if (FILE* file = std::fopen(path.c_str(), "w")) {
    std::fprintf(file, "%s\n", as_json(counters().groups).c_str());
    std::fclose(file);
  } else {
    std::fprintf(stderr, "CANN emulation: cannot write the counters to %s\n", path.c_str());
  }
}

struct DumpAtExit {
  ~DumpAtExit() {
    if (!settings().counters_path.empty()) dump_at_exit();
  }
} dump_when_unloaded;

}  // namespace

void count(const char* group, const std::string& name, int64_t bytes) {
  if (is_uncounted) return;
  std::lock_guard<std::mutex> lock(counters().mutex);
  Count& entry = counters().groups[group][name];
  entry.calls += 1;
  entry.bytes += bytes;
}

}  // namespace emu

// The text stays valid until the next call.
EMU_EXPORT const char* cann_emu_counters_json() {
  emu::Counters& all = emu::counters();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.json = emu::as_json(all.groups);
  return all.json.c_str();
}

EMU_EXPORT void cann_emu_counters_reset() {
  std::lock_guard<std::mutex> lock(emu::counters().mutex);
  emu::counters().groups.clear();
}

// What the graph engine in Python does for itself (waiting for earlier work) is not the program's doing.
EMU_EXPORT void cann_emu_uncounted(int is_on) { emu::is_uncounted = is_on != 0; }

EMU_EXPORT void cann_emu_count(const char* group, const char* name, int64_t bytes) { emu::count(group, name, bytes); }

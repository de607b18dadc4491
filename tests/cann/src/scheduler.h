// Streams as queues of tasks, and the objects that capture.cpp and streams.cpp share.
// Every runnable task runs at once, in the thread that submitted it; a task behind an unrecorded event waits in its
// queue. In lazy mode nothing runs before somebody synchronises, which shows hosts that overwrite buffers too early.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "emulation.h"

namespace emu {

struct Event {
  uint32_t flags = 0;
  std::atomic<uint64_t> issued{0};    // records submitted so far
  std::atomic<uint64_t> done{0};      // last record that a stream executed
  std::atomic<bool> is_set{false};    // external events only: recorded and not reset since
  std::atomic<int64_t> nanoseconds{0};
  int queries = 0;
  std::shared_ptr<struct Capture> capture;  // set when the last record happened inside a capture
  bool is_external() const { return (flags & ACL_EVENT_EXTERNAL) != 0; }
};

// One recorded task of a graph. A task-group update replaces `run`, also while the graph waits for an event.
struct Node {
  enum class Kind { work, wait_event, record_event, reset_event, wait_value } kind = Kind::work;
  std::string name;
  std::function<void()> run;
  std::function<bool()> is_ready;  // wait_value only
  std::shared_ptr<Event> event;
  TaskKind task_kind = TaskKind::launch;
};

struct TaskGroup {
  std::vector<std::shared_ptr<Node>> nodes;
};

struct Graph {
  uint32_t id;
  int num_streams;
  std::vector<std::shared_ptr<Node>> nodes;
  uint64_t collectives = 0;            // a hash of them in their order; 0 without any
  bool holds_device_threads = false;   // a communicator of this graph is spread out on the AI CPU
};

struct Capture {
  aclmdlRICaptureMode mode;
  std::thread::id thread;
  aclrtStream origin;
  std::set<aclrtStream> streams;
  std::set<aclrtStream> unjoined;
  std::unique_ptr<Graph> graph;
  bool is_invalid = false;
};

struct Task {
  enum class Kind { node, wait_ticket, record_ticket, graph } kind = Kind::node;
  std::shared_ptr<Node> node;
  std::shared_ptr<Event> event;
  uint64_t ticket = 0;
  Graph* graph = nullptr;
  bool is_replay = false;
  uint64_t collectives = 0;  // of the graph that is replayed
};

struct Stream {
  int id;
  int device;
  std::deque<Task> queue;
  bool is_busy = false;        // a host callback of this stream runs in its own thread
  bool stops_on_failure = true;
  int error = 0;
  std::string error_text;
  std::shared_ptr<Capture> capture;
  TaskGroup* open_group = nullptr;      // between TaskGrpBegin and TaskGrpEnd
  TaskGroup* updated_group = nullptr;   // between TaskUpdateBegin and TaskUpdateEnd
  size_t num_updated = 0;
};

struct Scheduler {
  std::recursive_mutex mutex;
  std::condition_variable_any progress;
  std::map<aclrtStream, std::unique_ptr<Stream>> streams;
  std::map<aclrtEvent, std::shared_ptr<Event>> events;
  std::set<Graph*> graphs;
  std::map<int, aclrtStream> default_streams;
  std::set<Capture*> captures;
  int next_stream_id = 0;
  uint32_t next_graph_id = 1;

  Stream* find(aclrtStream handle);               // nullptr: no such stream
  std::shared_ptr<Event> find_event(aclrtEvent handle);
  int num_streams_in_use() const;                 // streams made by the program plus those its graphs hold
  void run_what_can_run();
  void enqueue(Stream& stream, Task task);        // and runs it, unless lazy
};

Scheduler& scheduler();
aclmdlRICaptureMode& thread_capture_mode();

// Tells the graph that the stream is captured into, if it is, of a collective in it (capture.cpp).
void note_collective(aclrtStream handle, uint64_t what, bool is_on_ai_cpu);

// A call that may not happen while a capture is under way (as its mode says) ends the capture.
aclError refuse_while_capturing(const char* function);

}  // namespace emu

// Runs the tasks of all streams in order, as far as events allow.
#include "scheduler.h"

#include <algorithm>
#include <set>

namespace emu {

Scheduler& scheduler() {
  static Scheduler* instance = new Scheduler;
  return *instance;
}

namespace {

bool has_stopped(const Stream& stream) { return stream.error != 0 && stream.stops_on_failure; }

void fail(Stream& stream, int code, const std::string& text) {
  log("stream %d: %d %s", stream.id, code, text.c_str());
  for (auto& [handle, other] : scheduler().streams) {
    // Where one stops at a failure, those beside it in its context stop, too.
    bool is_hit = other.get() == &stream ||
                  (stream.stops_on_failure && other->stops_on_failure && other->device == stream.device);
    if (!is_hit || other->error != 0) continue;
    other->error = code;
    other->error_text = text;
  }
}

void run_callback(Stream& stream, std::function<void()> run) {
  stream.is_busy = true;
  // A thread of its own: the callback may want a lock that a thread waiting for this scheduler holds.
  std::thread([&stream, run = std::move(run)] {
    run();
    Scheduler& s = scheduler();
    std::lock_guard<std::recursive_mutex> lock(s.mutex);
    stream.is_busy = false;
    s.run_what_can_run();
  }).detach();
}

thread_local uint64_t running_collectives = 0;

void run_work(Stream& stream, const Task& task) {
  if (has_stopped(stream)) return;
  const Node& node = *task.node;
  if (task.is_replay && node.task_kind == TaskKind::launch) count("replayed", node.name);
  log("run %s on stream %d%s", node.name.c_str(), stream.id, task.is_replay ? " (replay)" : "");
  if (node.task_kind == TaskKind::callback) return run_callback(stream, node.run);
  running_collectives = task.collectives;
  try {
    node.run();
  } catch (const DeviceError& error) {
    fail(stream, error.code, node.name + ": " + error.what());
  } catch (const std::exception& error) {
    fail(stream, ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, node.name + ": " + error.what());
  }
}

void record(Event& event, uint64_t ticket) {
  event.done = std::max(event.done.load(), ticket);
  event.is_set = true;
  event.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
}

bool is_blocked(const Stream& stream) {
  const Task& head = stream.queue.front();
  if (has_stopped(stream)) return false;
  if (head.kind == Task::Kind::wait_ticket) return head.event->done < head.ticket;
  if (head.kind != Task::Kind::node) return false;
  if (head.node->kind == Node::Kind::wait_value) return !head.node->is_ready();
  return head.node->kind == Node::Kind::wait_event && !head.node->event->is_set;
}

void run_head(Stream& stream) {
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (has_stopped(stream) && task.kind != Task::Kind::node) return;
  if (task.kind == Task::Kind::record_ticket) return record(*task.event, task.ticket);
  if (task.kind == Task::Kind::wait_ticket) return;
  if (task.kind == Task::Kind::graph) {
    for (auto node = task.graph->nodes.rbegin(); node != task.graph->nodes.rend(); ++node) {
      Task step;
      step.node = *node;
      step.is_replay = true;
      step.collectives = task.graph->collectives;
      stream.queue.push_front(std::move(step));
    }
    return;
  }
  switch (task.node->kind) {
    case Node::Kind::work: return run_work(stream, task);
    case Node::Kind::record_event:
      if (has_stopped(stream)) return;
      return record(*task.node->event, ++task.node->event->issued);
    case Node::Kind::reset_event: task.node->event->is_set = false; return;
    case Node::Kind::wait_event:
    case Node::Kind::wait_value: return;
  }
}

}  // namespace

Stream* Scheduler::find(aclrtStream handle) {
  if (handle == nullptr) {
    auto found = default_streams.find(current_device());
    if (found == default_streams.end()) return nullptr;
    handle = found->second;
  }
  auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second.get();
}

std::shared_ptr<Event> Scheduler::find_event(aclrtEvent handle) {
  auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

int Scheduler::num_streams_in_use() const {
  int total = static_cast<int>(streams.size());
  for (const Graph* graph : graphs) total += graph->num_streams;
  return total;
}

void Scheduler::run_what_can_run() {
  for (bool has_progress = true; has_progress;) {
    has_progress = false;
    for (auto& [handle, stream] : streams) {
      while (!stream->is_busy && !stream->queue.empty() && !is_blocked(*stream)) {
        run_head(*stream);
        has_progress = true;
      }
    }
  }
  progress.notify_all();
}

void Scheduler::enqueue(Stream& stream, Task task) {
  stream.queue.push_back(std::move(task));
  if (!settings().is_lazy) run_what_can_run();
}

uint64_t collectives_of_running_graph() { return running_collectives; }

aclError submit(aclrtStream handle, const std::string& name, std::function<void()> run, TaskKind kind, const std::string& kernel) {
  static auto* loaded = new std::set<std::string>;
  Scheduler& s = scheduler();
  std::lock_guard<std::recursive_mutex> lock(s.mutex);
  Stream* stream = s.find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not a stream", name.c_str(), handle);
  if (!kernel.empty() && loaded->insert(kernel).second && stream->capture) {
    stream->capture->is_invalid = true;
    return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s: the kernel of its first launch with such operands is loaded, which is not allowed while a graph is being captured", name.c_str());
  }
  auto node = std::make_shared<Node>();
  node->name = name;
  node->run = std::move(run);
  node->task_kind = kind;
  if (TaskGroup* group = stream->updated_group) {
    if (stream->num_updated >= group->nodes.size() || group->nodes[stream->num_updated]->name != name) {
      return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "%s does not take the place of task %zu of a group of %zu",
                    name.c_str(), stream->num_updated, group->nodes.size());
    }
    count("updated", name);
    // In stream order: an earlier replay, still waiting in another stream's queue, keeps its arguments.
    std::shared_ptr<Node> target = group->nodes[stream->num_updated++];
    auto new_run = std::make_shared<std::function<void()>>(std::move(node->run));
    node->name = "update of " + name;
    node->task_kind = TaskKind::copy;
    node->run = [target, new_run] { target->run = *new_run; };
    Task task;
    task.node = std::move(node);
    s.enqueue(*stream, std::move(task));
    return ACL_SUCCESS;
  }
  if (stream->capture) {
    if (kind == TaskKind::launch) count("captured", name);
    stream->capture->graph->nodes.push_back(node);
    if (stream->open_group != nullptr) stream->open_group->nodes.push_back(node);
    return ACL_SUCCESS;
  }
  if (kind == TaskKind::launch) count("launches", name);
  Task task;
  task.node = std::move(node);
  s.enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

}  // namespace emu

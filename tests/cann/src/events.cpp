// Events: recorded by one stream, waited for by others; inside a capture they carry the capture along.
#include "scheduler.h"

namespace emu {
namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

aclError create_event(aclrtEvent* handle, uint32_t flags) {
  auto event = std::make_shared<Event>();
  event->flags = flags;
  Lock lock(scheduler().mutex);
  *handle = event.get();
  scheduler().events[event.get()] = std::move(event);
  return ACL_SUCCESS;
}

std::shared_ptr<Node> event_node(Node::Kind kind, std::shared_ptr<Event> event) {
  auto node = std::make_shared<Node>();
  node->kind = kind;
  node->name = "event";
  node->event = std::move(event);
  return node;
}

struct Found {
  Stream* stream;
  std::shared_ptr<Event> event;
  aclError code = ACL_SUCCESS;
};

Found find(const char* function, aclrtStream stream, aclrtEvent event) {
  Found found{scheduler().find(stream), scheduler().find_event(event)};
  log("%s: stream %d, event %p%s", function, found.stream == nullptr ? -1 : found.stream->id, event,
      found.event != nullptr && found.event->is_external() ? " (external)" : "");
  if (found.stream == nullptr || found.event == nullptr) {
    found.code = refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: stream %p, event %p", function, stream, event);
  }
  return found;
}

// The modes of aclrtValueWait.
constexpr uint32_t kWaitAtLeast = 0, kWaitEqual = 1, kWaitAnd = 2, kWaitNor = 3;

bool holds(uint64_t actual, uint64_t value, uint32_t flag) {
  switch (flag) {
    case kWaitAtLeast: return static_cast<int64_t>(actual - value) >= 0;
    case kWaitEqual: return actual == value;
    case kWaitAnd: return (actual & value) != 0;
    default: return ~(actual | value) != 0;
  }
}

aclError status_of(aclrtEvent handle, const char* function, bool* is_complete) {
  Lock lock(scheduler().mutex);
  auto event = scheduler().find_event(handle);
  if (event == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %p", function, handle);
  if (event->capture) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "%s: the event was recorded in a capture", function);
  *is_complete = event->done >= event->issued;
  // In lazy mode a first question must not finish the work, but a loop of questions must end.
  if (!*is_complete && ++event->queries > 1 && !settings().answers_without_running) scheduler().run_what_can_run();
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace emu

using emu::Event;
using emu::Lock;
using emu::Node;
using emu::refuse;
using emu::scheduler;
using emu::Task;

EMU_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) {
  EMU_ENTRY();
  return emu::create_event(event, 0);
}

EMU_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
  EMU_ENTRY();
  return emu::create_event(event, flags);
}

EMU_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  EMU_ENTRY();
  return emu::create_event(event, flags);
}

EMU_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  return scheduler().events.erase(event) == 1 ? ACL_SUCCESS : refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent: %p", event);
}

EMU_EXPORT aclError aclrtRecordEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto [stream, event, code] = emu::find("aclrtRecordEvent", stream_handle, event_handle);
  if (code != ACL_SUCCESS) return code;
  if (stream->capture) {
    if (event->is_external()) {
      stream->capture->graph->nodes.push_back(emu::event_node(Node::Kind::record_event, event));
    } else {
      event->capture = stream->capture;
      stream->capture->unjoined.erase(stream);  // whoever waits for this event joins this stream's work
    }
    return ACL_SUCCESS;
  }
  event->capture = nullptr;
  event->queries = 0;
  Task task;
  task.kind = Task::Kind::record_ticket;
  task.event = event;
  task.ticket = ++event->issued;
  scheduler().enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent event_handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto [stream, event, code] = emu::find("aclrtStreamWaitEvent", stream_handle, event_handle);
  if (code != ACL_SUCCESS) return code;
  if (event->is_external()) {
    auto node = emu::event_node(Node::Kind::wait_event, event);
    if (stream->capture) {
      stream->capture->graph->nodes.push_back(node);
    } else {
      Task task;
      task.node = node;
      scheduler().enqueue(*stream, std::move(task));
    }
    return ACL_SUCCESS;
  }
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) {
      return refuse(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "aclrtStreamWaitEvent: stream %d belongs to another capture", stream->id);
    }
    if (!stream->capture) {  // the stream joins the capture
      stream->capture = event->capture;
      event->capture->streams.insert(stream);
      event->capture->unjoined.insert(stream);
    }
    return ACL_SUCCESS;
  }
  if (stream->capture) {
    stream->capture->is_invalid = true;
    return refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "aclrtStreamWaitEvent: stream %d is captured, the event's record is not",
                  stream->id);
  }
  Task task;
  task.kind = Task::Kind::wait_ticket;
  task.event = event;
  task.ticket = event->issued;
  scheduler().enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtResetEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto [stream, event, code] = emu::find("aclrtResetEvent", stream_handle, event_handle);
  if (code != ACL_SUCCESS) return code;
  auto node = emu::event_node(Node::Kind::reset_event, event);
  if (stream->capture) {
    stream->capture->graph->nodes.push_back(node);
    return ACL_SUCCESS;
  }
  Task task;
  task.node = node;
  scheduler().enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

// ---- words of device memory that one stream writes and another waits for; torch_npu's external events are made of them

EMU_EXPORT aclError aclrtValueWrite(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  EMU_ENTRY();
  if (flag != 0 || !emu::is_device_range(address, sizeof value) || reinterpret_cast<uintptr_t>(address) % sizeof value != 0) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: %p, flag %u", address, flag);
  }
  return emu::submit(stream, "value_write", [=] { *static_cast<uint64_t*>(address) = value; }, emu::TaskKind::copy);
}

EMU_EXPORT aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream handle) {
  EMU_ENTRY();
  if (flag > emu::kWaitNor || !emu::is_device_range(address, sizeof value) || reinterpret_cast<uintptr_t>(address) % sizeof value != 0) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: %p, flag %u", address, flag);
  }
  Lock lock(scheduler().mutex);
  emu::Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: %p is not a stream", handle);
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::wait_value;
  node->name = "value_wait";
  node->is_ready = [=] { return emu::holds(*static_cast<uint64_t*>(address), value, flag); };
  if (stream->capture) {
    stream->capture->graph->nodes.push_back(node);
    return ACL_SUCCESS;
  }
  Task task;
  task.node = std::move(node);
  scheduler().enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  EMU_ENTRY();
  bool is_complete = false;
  aclError code = emu::status_of(event, "aclrtQueryEventStatus", &is_complete);
  *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return code;
}

EMU_EXPORT aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status) {
  EMU_ENTRY();
  bool is_complete = false;
  aclError code = emu::status_of(event, "aclrtQueryEvent", &is_complete);
  *status = is_complete ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
  return code;
}

EMU_EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  EMU_ENTRY();
  bool is_complete = false;
  aclError code = emu::status_of(event, "aclrtQueryEventWaitStatus", &is_complete);
  *status = is_complete ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return code;
}

EMU_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto event = scheduler().find_event(handle);
  if (event == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtSynchronizeEvent: %p", handle);
  emu::count("syncs", "event");
  scheduler().run_what_can_run();
  auto limit = std::chrono::milliseconds(emu::settings().sync_timeout_ms);
  if (!scheduler().progress.wait_for(lock, limit, [&] { return event->done >= event->issued; })) {
    return refuse(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "aclrtSynchronizeEvent: nobody records the event");
  }
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent start_handle, aclrtEvent end_handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto start = scheduler().find_event(start_handle), end = scheduler().find_event(end_handle);
  if (start == nullptr || end == nullptr || start->done == 0 || end->done == 0) {
    return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event was not recorded");
  }
  *ms = static_cast<float>(end->nanoseconds - start->nanoseconds) / 1e6F;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto event = scheduler().find_event(handle);
  if (event == nullptr || event->done == 0) return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventGetTimestamp");
  *microseconds = static_cast<uint64_t>(event->nanoseconds / 1000);
  return ACL_SUCCESS;
}

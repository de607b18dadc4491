// ACL graphs: capture (nothing runs, tasks are recorded), replay, task groups and their update.
#include "scheduler.h"

namespace emu {

aclmdlRICaptureMode& thread_capture_mode() {
  thread_local aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return mode;
}

aclError refuse_while_capturing(const char* function) {
  Scheduler& s = scheduler();
  std::lock_guard<std::recursive_mutex> lock(s.mutex);
  if (thread_capture_mode() == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  for (Capture* capture : s.captures) {
    bool is_forbidden = capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL ||
                        (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL && capture->thread == std::this_thread::get_id());
    if (is_forbidden) {
      capture->is_invalid = true;
      return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s is not allowed while a graph is being captured", function);
    }
  }
  return ACL_SUCCESS;
}

namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

void leave_capture(Capture& capture) {
  for (aclrtStream handle : capture.streams) {
    if (Stream* stream = scheduler().find(handle)) {
      stream->capture = nullptr;
      stream->open_group = nullptr;
    }
  }
  for (auto& [handle, event] : scheduler().events) {
    if (event->capture.get() == &capture) event->capture = nullptr;
  }
  scheduler().captures.erase(&capture);
}

// HCCL on the A3 series keeps threads on the device for each graph with collectives that are spread out on the AI CPU.
constexpr int kMostGraphsOnAiCpu = 6;

int num_graphs_with_device_threads() {
  int total = 0;
  for (const Graph* graph : scheduler().graphs) total += graph->holds_device_threads;
  return total;
}

}  // namespace

void note_collective(aclrtStream handle, uint64_t what, bool is_on_ai_cpu) {
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || !stream->capture) return;
  Graph& graph = *stream->capture->graph;
  if (what != 0) graph.collectives = (graph.collectives ^ what) * 0x100000001b3ULL | 1;
  graph.holds_device_threads |= is_on_ai_cpu && is_a3();
}

}  // namespace emu

using emu::Capture;
using emu::Graph;
using emu::Lock;
using emu::refuse;
using emu::scheduler;
using emu::Stream;
using emu::TaskGroup;

EMU_EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || handle == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureBegin: %p", handle);
  if (stream->capture) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "aclmdlRICaptureBegin: stream %d is being captured", stream->id);
  if (static_cast<int>(scheduler().graphs.size()) >= emu::settings().max_graphs) {
    return refuse(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "resource alloc fail: alloc sq cq fail, %zu graphs exist", scheduler().graphs.size());
  }
  if (scheduler().num_streams_in_use() >= emu::settings().max_streams) {
    return refuse(ACL_ERROR_RT_NO_STREAM_RESOURCE, "stream insufficient: %d streams are in use", scheduler().num_streams_in_use());
  }
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = handle;
  capture->streams.insert(handle);
  capture->graph = std::make_unique<Graph>();
  capture->graph->id = scheduler().next_graph_id++;
  scheduler().captures.insert(capture.get());
  stream->capture = capture;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || !stream->capture) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd: %p", handle);
  std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != handle) {
    return refuse(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "aclmdlRICaptureEnd: the capture began on another stream");
  }
  emu::leave_capture(*capture);
  *model = nullptr;
  if (!capture->unjoined.empty()) {
    return refuse(ACL_ERROR_RT_STREAM_UNJOINED, "aclmdlRICaptureEnd: %zu streams never joined back", capture->unjoined.size());
  }
  if (capture->is_invalid) {
    return refuse(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "aclmdlRICaptureEnd: a call in between was not allowed");
  }
  if (capture->graph->holds_device_threads && emu::num_graphs_with_device_threads() >= emu::kMostGraphsOnAiCpu) {
    return refuse(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
                  "resource alloc fail: %d graphs with collectives on the AI CPU exist, an A3 takes no more", emu::kMostGraphsOnAiCpu);
  }
  capture->graph->num_streams = static_cast<int>(capture->streams.size());
  emu::count("graphs", "captured");
  Graph* graph = capture->graph.release();
  scheduler().graphs.insert(graph);
  *model = graph;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureGetInfo: %p", handle);
  if (!stream->capture) {
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model != nullptr) *model = nullptr;
    return ACL_SUCCESS;
  }
  *status = stream->capture->is_invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model != nullptr) *model = stream->capture->graph.get();
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  EMU_ENTRY();
  std::swap(*mode, emu::thread_capture_mode());
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
  EMU_ENTRY();
  *id = static_cast<Graph*>(model)->id;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto* graph = static_cast<Graph*>(model);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || scheduler().graphs.count(graph) == 0) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIExecuteAsync: model %p, stream %p", model, handle);
  }
  if (stream->capture) {
    stream->capture->is_invalid = true;
    return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "aclmdlRIExecuteAsync: stream %d is being captured", stream->id);
  }
  emu::count("graphs", "replayed");
  emu::Task task;
  task.kind = emu::Task::Kind::graph;
  task.graph = graph;
  scheduler().enqueue(*stream, std::move(task));
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRIDestroy(aclmdlRI model) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  auto* graph = static_cast<Graph*>(model);
  if (scheduler().graphs.erase(graph) == 0) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIDestroy: %p", model);
  for (auto& [handle, stream] : scheduler().streams) {
    for (const emu::Task& task : stream->queue) {
      if (task.graph == graph) {
        scheduler().graphs.insert(graph);
        return refuse(ACL_ERROR_RT_MODEL_RUNNING, "aclmdlRIDestroy: graph %u still has to run", graph->id);
      }
    }
  }
  delete graph;
  return ACL_SUCCESS;
}

// ---- task groups: launches whose arguments the host replaces before a replay

EMU_EXPORT aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || !stream->capture) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureTaskGrpBegin");
  if (stream->open_group != nullptr) return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskGrpBegin: a group is open");
  stream->open_group = new TaskGroup;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || stream->open_group == nullptr) {
    return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskGrpEnd: no group is open");
  }
  // Lives as long as the process: the program may update it as long as it keeps the graph, and never hands it back.
  *group = stream->open_group;
  stream->open_group = nullptr;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || group == nullptr || stream->updated_group != nullptr || stream->capture) {
    return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskUpdateBegin: stream %p, group %p", handle, group);
  }
  stream->updated_group = static_cast<TaskGroup*>(group);
  stream->num_updated = 0;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr || stream->updated_group == nullptr) {
    return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskUpdateEnd: no update is under way");
  }
  size_t num_tasks = stream->updated_group->nodes.size(), num_updated = stream->num_updated;
  stream->updated_group = nullptr;
  if (num_updated != num_tasks) {
    return refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "aclmdlRICaptureTaskUpdateEnd: %zu of %zu tasks were updated", num_updated, num_tasks);
  }
  return ACL_SUCCESS;
}

// Devices, contexts, streams, events and synchronisation: the C calls over the scheduler.
#include <cstdlib>
#include <sstream>

#include "scheduler.h"

namespace emu {
namespace {

thread_local int device_of_thread = -1;
int contexts[64];  // only their addresses matter: one primary context for each device

// ASCEND_RT_VISIBLE_DEVICES narrows the devices a process sees and renumbers them from 0.
int num_visible_devices() {
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (visible == nullptr || *visible == '\0') return settings().num_devices;
  int count = 0;
  std::stringstream entries(visible);
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (std::atoi(entry.c_str()) >= settings().num_devices) break;  // the first invalid entry hides those after it
    ++count;
  }
  return count;
}

using Lock = std::unique_lock<std::recursive_mutex>;

aclError take_error(Stream& stream) {
  int code = stream.error;
  if (code == 0) return ACL_SUCCESS;
  if (!stream.stops_on_failure) stream.error = 0;
  return refuse(code, "%s", stream.error_text.c_str());
}

template <class Done>
bool wait_until(Lock& lock, int timeout_ms, Done is_done) {
  scheduler().run_what_can_run();
  if (timeout_ms < 0) timeout_ms = settings().sync_timeout_ms;
  return scheduler().progress.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done);
}

bool is_idle(const Stream& stream) { return stream.queue.empty() && !stream.is_busy; }

aclError synchronize(Lock& lock, Stream& stream, int timeout_ms) {
  if (!wait_until(lock, timeout_ms, [&] { return is_idle(stream); })) {
    return refuse(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d still waits for an event that nobody records, %zu tasks behind it",
                  stream.id, stream.queue.size());
  }
  return take_error(stream);
}

aclError synchronize_all(int timeout_ms) {
  Scheduler& s = scheduler();
  Lock lock(s.mutex);
  aclError first = ACL_SUCCESS;
  for (auto& [handle, stream] : s.streams) {
    aclError code = synchronize(lock, *stream, timeout_ms);
    if (first == ACL_SUCCESS) first = code;
  }
  return first;
}

aclError create_stream(aclrtStream* handle, int device) {
  Scheduler& s = scheduler();
  Lock lock(s.mutex);
  if (s.num_streams_in_use() >= settings().max_streams) {
    return refuse(ACL_ERROR_RT_NO_STREAM_RESOURCE, "stream insufficient: %d streams are in use", s.num_streams_in_use());
  }
  auto stream = std::make_unique<Stream>();
  stream->id = s.next_stream_id++;
  stream->device = device;
  *handle = stream.get();
  s.streams[stream.get()] = std::move(stream);
  return ACL_SUCCESS;
}

}  // namespace

int current_device() { return device_of_thread; }

aclError synchronize_everything() {
  if (aclError code = refuse_while_capturing("implicit synchronisation")) return code;
  return synchronize_all(-1);
}

}  // namespace emu

using emu::Event;
using emu::Lock;
using emu::refuse;
using emu::scheduler;
using emu::Stream;
using emu::Task;

// ---- devices and contexts

EMU_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  EMU_ENTRY();
  *count = static_cast<uint32_t>(emu::num_visible_devices());
  return *count > 0 ? ACL_SUCCESS : refuse(ACL_ERROR_RT_NO_DEVICE, "aclrtGetDeviceCount: no device is visible");
}

EMU_EXPORT aclError aclrtSetDevice(int32_t device) {
  EMU_ENTRY();
  if (device < 0 || device >= emu::num_visible_devices()) {
    return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: %d of %d devices", device, emu::num_visible_devices());
  }
  emu::device_of_thread = device;
  Lock lock(scheduler().mutex);
  if (scheduler().default_streams.count(device) == 0) {
    return emu::create_stream(&scheduler().default_streams[device], device);
  }
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtResetDevice(int32_t) {
  EMU_ENTRY();
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetDevice(int32_t* device) {
  EMU_ENTRY();
  if (emu::device_of_thread < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetDevice: no device set in this thread");
  *device = emu::device_of_thread;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  EMU_ENTRY();
  if (emu::device_of_thread < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetCurrentContext: no device set in this thread");
  *context = &emu::contexts[emu::device_of_thread];
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  EMU_ENTRY();
  ptrdiff_t device = static_cast<int*>(context) - emu::contexts;
  if (context == nullptr || device < 0 || device >= emu::settings().num_devices) {
    return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext: %p is not a context", context);
  }
  emu::device_of_thread = static_cast<int>(device);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  if (flags != nullptr) *flags = 0;
  *active = scheduler().default_streams.count(device) != 0;
  return ACL_SUCCESS;
}

// ---- streams

EMU_EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  EMU_ENTRY();
  if (emu::device_of_thread < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream: no device set in this thread");
  return emu::create_stream(stream, emu::device_of_thread);
}

EMU_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

EMU_EXPORT aclError aclrtDestroyStream(aclrtStream handle) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (handle == nullptr || stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyStream: %p", handle);
  emu::synchronize(lock, *stream, -1);
  scheduler().streams.erase(handle);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

EMU_EXPORT aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetStreamFailureMode: %p", handle);
  stream->stops_on_failure = mode != 0;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamGetId: %p", handle);
  *id = stream->id;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamQuery: %p", handle);
  if (stream->capture) {
    stream->capture->is_invalid = true;
    return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtStreamQuery: stream %d is being captured", stream->id);
  }
  *status = emu::is_idle(*stream) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  scheduler().run_what_can_run();
  return emu::take_error(*stream);
}

EMU_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  EMU_ENTRY();
  Lock lock(scheduler().mutex);
  Stream* stream = scheduler().find(handle);
  if (stream == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtSynchronizeStream: %p", handle);
  if (stream->capture) {
    stream->capture->is_invalid = true;
    return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtSynchronizeStream: stream %d is being captured", stream->id);
  }
  emu::count("syncs", "stream");
  return emu::synchronize(lock, *stream, timeout_ms);
}

EMU_EXPORT aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }

EMU_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  EMU_ENTRY();
  if (aclError code = emu::refuse_while_capturing("aclrtSynchronizeDevice")) return code;
  emu::count("syncs", "device");
  return emu::synchronize_all(timeout_ms);
}

EMU_EXPORT aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

// Tests only: a stopped stream accepts work again, and a refused update is closed, so that one process can provoke many errors.
EMU_EXPORT void cann_emu_clear_errors() {
  Lock lock(scheduler().mutex);
  for (auto& [handle, stream] : scheduler().streams) {
    stream->error = 0;
    stream->updated_group = nullptr;
  }
}

// ---- host callbacks

EMU_EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* arguments) {
  EMU_ENTRY();
  return emu::submit(stream, "host_function", [=] { function(arguments); }, emu::TaskKind::callback);
}

EMU_EXPORT aclError aclrtLaunchCallback(aclrtCallback function, void* arguments, aclrtCallbackBlockType, aclrtStream stream) {
  EMU_ENTRY();
  return emu::submit(stream, "host_callback", [=] { function(arguments); }, emu::TaskKind::callback);
}

EMU_EXPORT aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

EMU_EXPORT aclError aclrtProcessReport(int32_t timeout_ms) {
  // Callbacks run by themselves here; the thread that polls for them only has to sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms < 0 ? 100 : std::min(timeout_ms, 100)));
  return ACL_ERROR_RT_REPORT_TIMEOUT;
}

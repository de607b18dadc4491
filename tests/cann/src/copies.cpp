// Copies and fills, synchronous and on a stream; the direction given must agree with what the pointers are.
#include <cstring>

#include "emulation.h"

namespace emu {
namespace {

bool is_to_device(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE ||
         kind == ACL_MEMCPY_INNER_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_INTER_DEVICE_TO_DEVICE;
}

bool is_from_device(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE ||
         kind == ACL_MEMCPY_INNER_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_INTER_DEVICE_TO_DEVICE;
}

// Says where a direction lies about its pointers; a device would fault or copy garbage.
aclError check(const char* function, const void* dst, size_t limit, const void* src, size_t bytes, aclrtMemcpyKind* kind) {
  if (dst == nullptr || src == nullptr || bytes > limit) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes from %p to %p, which holds %zu", function, bytes, src, dst, limit);
  }
  bool to = is_device_pointer(dst), from = is_device_pointer(src);
  if (*kind == ACL_MEMCPY_DEFAULT) {
    *kind = from ? (to ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST)
                 : (to ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_HOST_TO_HOST);
  }
  bool is_true = to == is_to_device(*kind) && from == is_from_device(*kind);
  bool is_inside = (!to || is_device_range(dst, bytes)) && (!from || is_device_range(src, bytes));
  if (!is_true || !is_inside) {
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: kind %d, but source %p is%s and destination %p is%s device memory%s", function,
                  *kind, src, from ? "" : " not", dst, to ? "" : " not", is_inside ? "" : " (the range ends outside it)");
  }
  return ACL_SUCCESS;
}

const char* direction(aclrtMemcpyKind kind) {
  if (is_to_device(kind)) return is_from_device(kind) ? "d2d" : "h2d";
  return is_from_device(kind) ? "d2h" : "h2h";
}

}  // namespace
}  // namespace emu

EMU_EXPORT aclError aclrtMemcpy(void* dst, size_t limit, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  EMU_ENTRY();
  if (bytes == 0) return ACL_SUCCESS;
  if (aclError code = emu::check("aclrtMemcpy", dst, limit, src, bytes, &kind)) return code;
  if (aclError code = emu::synchronize_everything()) return code;
  emu::count("copies", emu::direction(kind), static_cast<int64_t>(bytes));
  std::memmove(dst, src, bytes);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtMemcpyAsync(void* dst, size_t limit, const void* src, size_t bytes, aclrtMemcpyKind kind,
                                     aclrtStream stream) {
  EMU_ENTRY();
  if (bytes == 0) return ACL_SUCCESS;
  if (aclError code = emu::check("aclrtMemcpyAsync", dst, limit, src, bytes, &kind)) return code;
  const char* direction = emu::direction(kind);
  return emu::submit(stream, std::string("memcpy_") + direction, [=] {
    emu::count("copies", direction, static_cast<int64_t>(bytes));
    std::memmove(dst, src, bytes);
  }, emu::TaskKind::copy);
}

EMU_EXPORT aclError aclrtMemset(void* dst, size_t limit, int32_t value, size_t bytes) {
  EMU_ENTRY();
  if (bytes > limit || !emu::is_device_range(dst, bytes)) {
    return emu::refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset: %zu bytes at %p are not device memory", bytes, dst);
  }
  if (aclError code = emu::synchronize_everything()) return code;
  std::memset(dst, value, bytes);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtMemsetAsync(void* dst, size_t limit, int32_t value, size_t bytes, aclrtStream stream) {
  EMU_ENTRY();
  if (bytes > limit || !emu::is_device_range(dst, bytes)) {
    return emu::refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync: %zu bytes at %p are not device memory", bytes, dst);
  }
  return emu::submit(stream, "memset", [=] { std::memset(dst, value, bytes); }, emu::TaskKind::copy);
}

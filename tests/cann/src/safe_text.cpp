// The bounded string functions that CANN's libraries bring along (C11 annex K with a count), as torch_npu calls them.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "emulation.h"

// At most `count` characters of the text fit into `size` bytes with the closing zero, or the answer is -1.
EMU_EXPORT int vsnprintf_s(char* target, size_t size, size_t count, const char* format, va_list arguments) {
  if (target == nullptr || format == nullptr || size == 0) return -1;
  int length = std::vsnprintf(target, count + 1 < size ? count + 1 : size, format, arguments);
  return length < 0 || static_cast<size_t>(length) >= size || static_cast<size_t>(length) > count ? -1 : length;
}

EMU_EXPORT int snprintf_s(char* target, size_t size, size_t count, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf_s(target, size, count, format, arguments);
  va_end(arguments);
  return length;
}

EMU_EXPORT int strcpy_s(char* target, size_t size, const char* source) {
  if (target == nullptr || source == nullptr || std::strlen(source) >= size) return -1;
  std::memcpy(target, source, std::strlen(source) + 1);
  return 0;
}

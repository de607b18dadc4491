// Loaded before everything else where torch is a build for CUDA. torch keeps the names of the allocators' settings in one
// set, and stops the program when a second vendor registers a name again: torch_npu registers its own into a set apart,
// which then becomes part of the other.
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <unordered_set>

using Keys = std::unordered_set<std::string>;

// c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys
#define MUTABLE_KEYS "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
__attribute__((visibility("default"))) Keys& mutable_keys() __asm__(MUTABLE_KEYS);

Keys& mutable_keys() {
  static Keys registered_by_torch_npu;
  static void* torch = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  static Keys& registered = reinterpret_cast<Keys& (*)()>(dlsym(torch, MUTABLE_KEYS))();
  Dl_info caller;
  bool is_torch_npu = dladdr(__builtin_return_address(0), &caller) != 0 && std::strstr(caller.dli_fname, "libtorch_npu") != nullptr;
  if (is_torch_npu && registered_by_torch_npu.empty()) return registered_by_torch_npu;
  registered.insert(registered_by_torch_npu.begin(), registered_by_torch_npu.end());
  return registered;
}

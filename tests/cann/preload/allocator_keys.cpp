// Loaded before everything else where torch is a build for CUDA. torch keeps the names of the allocators' settings in one
// set, and stops the program when a second vendor brings one of the first's; torch_npu's are kept apart here.
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <unordered_set>

using Keys = std::unordered_set<std::string>;

// c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys
__attribute__((visibility("default"))) Keys& mutable_keys() __asm__(
    "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev");

Keys& mutable_keys() {
  static Keys of_torch, of_torch_npu;
  Dl_info caller;
  bool is_torch_npu = dladdr(__builtin_return_address(0), &caller) != 0 && std::strstr(caller.dli_fname, "libtorch_npu") != nullptr;
  return is_torch_npu ? of_torch_npu : of_torch;
}

// Questions about the host and the device, limits that may be set and read back, and the old operator route, refused.
#include <cstring>
#include <mutex>

#include "emulation.h"

using emu::refuse;

namespace {

constexpr uint32_t kCubeCores = 24;
constexpr uint32_t kVectorCores = 48;

uint32_t num_cores(aclrtDevResLimitType type) { return type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores; }

std::mutex mutex;
std::map<int, int64_t> system_options;

}  // namespace

EMU_EXPORT aclError aclInit(const char*) {
  EMU_ENTRY();
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclFinalize() {
  EMU_ENTRY();
  return ACL_SUCCESS;
}

EMU_EXPORT const char* aclrtGetSocName() { return emu::settings().soc_name.c_str(); }

EMU_EXPORT aclError aclsysGetVersionStr(char* package, char* version) {
  EMU_ENTRY();
  if (package == nullptr || version == nullptr) return refuse(ACL_ERROR_INVALID_PARAM, "aclsysGetVersionStr");
  std::strcpy(version, emu::cann_version_text().c_str());
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  EMU_ENTRY();
  std::memset(version, 0, sizeof *version);
  const std::string text = emu::cann_version_text();  // one digit each: 9.0.0
  std::strcpy(version->version, text.c_str());
  std::strcpy(version->majorVersion, text.substr(0, 1).c_str());
  std::strcpy(version->minorVersion, text.substr(2, 1).c_str());
  std::strcpy(version->releaseVersion, text.substr(4, 1).c_str());
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  EMU_ENTRY();
  *value = info == ACL_DEVICE_INFO_AI_CORE_NUM ? kCubeCores : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? kVectorCores : 192 << 20;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  EMU_ENTRY();
  switch (attribute) {
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = kCubeCores; return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = kVectorCores; return ACL_SUCCESS;
    default: return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtGetDeviceInfo: attribute %d is not emulated", attribute);
  }
}

EMU_EXPORT aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  EMU_ENTRY();
  *value = attribute != ACL_CANN_ATTR_JIT_COMPILE;  // inf/nan mode and bfloat16 exist, just-in-time kernels do not
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device, int32_t peer) {
  EMU_ENTRY();
  *can_access = device != peer;
  return ACL_SUCCESS;
}

// Copies between devices are plain copies here, allowed or not.
EMU_EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  EMU_ENTRY();
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  EMU_ENTRY();
  *logic = user;
  return ACL_SUCCESS;
}

// ---- options: stored, so that what a program sets is what it reads

EMU_EXPORT size_t aclGetCompileoptSize(aclCompileOpt) { return 64; }

// "disable" for just-in-time compilation sends torch_npu down the aclnn route.
EMU_EXPORT aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  EMU_ENTRY();
  std::strncpy(value, "disable", length);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclSetCompileopt(aclCompileOpt, const char*) {
  EMU_ENTRY();
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  EMU_ENTRY();
  std::lock_guard<std::mutex> lock(mutex);
  system_options[option] = value;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

EMU_EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  EMU_ENTRY();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = system_options.find(option);
  *value = found == system_options.end() ? 0 : found->second;  // every option starts switched off
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  EMU_ENTRY();
  return mode == ACL_RT_OVERFLOW_MODE_INFNAN || mode == ACL_RT_OVERFLOW_MODE_SATURATION
             ? ACL_SUCCESS
             : refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetDeviceSatMode: %d", mode);
}

EMU_EXPORT aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  EMU_ENTRY();
  *flag = 0;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

EMU_EXPORT aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  *actual = timeout;
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

EMU_EXPORT aclError aclrtGetErrorVerbose(int32_t, aclrtErrorInfo* info) {
  std::memset(info, 0, sizeof *info);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  EMU_ENTRY();
  *value = num_cores(type);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  EMU_ENTRY();
  *value = num_cores(type);
  return ACL_SUCCESS;
}

EMU_EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  EMU_ENTRY();
  *value = num_cores(type);
  return ACL_SUCCESS;
}

// Counted: torchair calls it for every attention of every replay, and a device then asks about it at each eager launch.
EMU_EXPORT aclError aclrtSetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t) {
  emu::count("host_calls", "aclrtSetStreamResLimit");
  return ACL_SUCCESS;
}
EMU_EXPORT aclError aclrtResetStreamResLimit(aclrtStream) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
EMU_EXPORT aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }

// A prefetch into the cache changes no value.
EMU_EXPORT aclError aclrtCmoAsync(void* source, size_t size, aclrtCmoType, aclrtStream stream) {
  EMU_ENTRY();
  if (!emu::is_device_range(source, size)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtCmoAsync: %p", source);
  return emu::submit(stream, "aclrtCmoAsync", [] {});
}

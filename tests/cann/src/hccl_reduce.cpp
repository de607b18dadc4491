// Reductions over the values of several ranks.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "hccl_group.h"

namespace emu {
namespace {

template <class Wide>
Wide combine(HcclReduceOp reduction, Wide a, Wide b) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return a + b;
    case HCCL_REDUCE_PROD: return a * b;
    case HCCL_REDUCE_MAX: return std::max(a, b);
    default: return std::min(a, b);
  }
}

template <class Value, class Wide = Value>
void reduce_as(HcclReduceOp reduction, const std::vector<const char*>& sources, char* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Wide total = static_cast<Wide>(reinterpret_cast<const Value*>(sources[0])[i]);
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      total = combine(reduction, total, static_cast<Wide>(reinterpret_cast<const Value*>(sources[rank])[i]));
    }
    reinterpret_cast<Value*>(target)[i] = static_cast<Value>(total);
  }
}

}  // namespace

size_t bytes_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    default: return 0;
  }
}

void reduce_values(HcclDataType type, HcclReduceOp reduction, const std::vector<const char*>& sources, char* target, size_t count) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_UINT8: return reduce_as<uint8_t>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_FP16: return reduce_as<c10::Half, float>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<c10::BFloat16, float>(reduction, sources, target, count);
    case HCCL_DATA_TYPE_FP32: return reduce_as<float>(reduction, sources, target, count);
    default: throw DeviceError(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, "reduction of data type " + std::to_string(type) + " is not emulated");
  }
}

}  // namespace emu

// The Ascend Transformer Boost (ATB), as far as torch_npu's libop_plugin_atb.so binds it: contexts, and one operation,
// ReshapeAndCache, which writes keys and values into a paged cache. Knows no tensor library: its kernel copies rows.
// Structures and virtual functions stand in the order of ATB's binary interface, as far as that library reads and calls them.
#include <cstring>
#include <set>

#include "emulation.h"

#pragma GCC visibility push(default)
namespace atb {

using Status = int32_t;
constexpr Status kDone = 0, kInvalidParam = 1, kInvalidDtype = 6, kInvalidFormat = 7, kInvalidDim = 8, kInvalidDimNum = 16;

struct Dims {
  int64_t dims[8];
  uint64_t dimNum = 0;
};
struct TensorDesc {
  aclDataType dtype;
  aclFormat format;
  Dims shape;
};
struct Tensor {
  TensorDesc desc;
  void* deviceData = nullptr;
  void* hostData = nullptr;
  uint64_t dataSize = 0;
};
template <class T>
struct SVector {  // up to 64 elements lie in the object, more behind `heap`
  size_t capacity, size;
  T storage[65];
  T* heap;
  const T& operator[](size_t index) const { return heap != nullptr ? heap[index] : storage[index]; }
};
struct VariantPack {
  SVector<Tensor> inTensors, outTensors;
};

struct Context {
  virtual ~Context() = default;
  virtual Status SetExecuteStream(aclrtStream stream) = 0;
  virtual aclrtStream GetExecuteStream() const = 0;
};

struct Operation {
  virtual ~Operation() = default;
  virtual std::string GetName() const = 0;
  virtual Status InferShape(const SVector<TensorDesc>& given, SVector<TensorDesc>& made) const = 0;
  virtual uint32_t GetInputNum() const = 0;
  virtual uint32_t GetOutputNum() const = 0;
  virtual Status Setup(const VariantPack& pack, uint64_t& workspace_size, Context* context) = 0;
  virtual Status Execute(const VariantPack& pack, uint8_t* workspace, uint64_t workspace_size, Context* context) = 0;
};

namespace infer {
struct ReshapeAndCacheParam {
  int compressType, kvCacheCfg;  // 0, 0: nothing is compressed, and both caches are ND
};
}  // namespace infer

struct Utils {
  static uint64_t GetTensorSize(const Tensor& tensor);
};

}  // namespace atb
#pragma GCC visibility pop

namespace {

using atb::Status;

const char* const kName = "ReshapeAndCacheOperation";

size_t bytes_of(aclDataType type) {
  switch (type) {
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8: return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16: return 2;
    case ACL_FLOAT:
    case ACL_INT32: return 4;
    case ACL_INT64:
    case ACL_DOUBLE: return 8;
    default: emu::not_emulated("a tensor of another type in ATB");
  }
}

struct StreamContext : atb::Context {
  aclrtStream stream = nullptr;
  Status SetExecuteStream(aclrtStream given) override {
    stream = given;
    return atb::kDone;
  }
  aclrtStream GetExecuteStream() const override { return stream; }
};

// One of the two caches with the rows that go there; a row is a token's heads.
struct Rows {
  const char* values;
  char* cache;
  size_t row_bytes, num_tokens, num_slots;
  Rows(const atb::Tensor& given, const atb::Tensor& into) {
    values = static_cast<const char*>(given.deviceData);
    cache = static_cast<char*>(into.deviceData);
    num_tokens = given.desc.shape.dims[0];
    num_slots = into.desc.shape.dims[0] * into.desc.shape.dims[1];
    row_bytes = into.dataSize / num_slots;
  }
  void write(const int32_t* slots) const {
    for (size_t token = 0; token < num_tokens; ++token) {
      if (slots[token] < 0) continue;  // documented: nothing is stored
      std::memcpy(cache + slots[token] * row_bytes, values + token * row_bytes, row_bytes);
    }
  }
};

// A slot outside of the cache faults, and so does one that stands twice, which the document forbids. Block 0 is left out, for the
// steps that a runner makes up to measure memory; what they write is never read.
void check_slots(const int32_t* slots, size_t num_tokens, int64_t num_slots, int64_t block_size) {
  std::set<int32_t> seen;
  for (size_t token = 0; token < num_tokens; ++token) {
    if (slots[token] >= num_slots) {
      throw emu::DeviceError(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "slotMapping holds " + std::to_string(slots[token]) +
                                                                     ", the cache has " + std::to_string(num_slots) + " slots");
    }
    if (slots[token] >= block_size && !seen.insert(slots[token]).second) {
      throw emu::DeviceError(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "slotMapping names slot " + std::to_string(slots[token]) + " twice");
    }
  }
}

class ReshapeAndCache : public atb::Operation {
 public:
  std::string GetName() const override { return kName; }
  Status InferShape(const atb::SVector<atb::TensorDesc>&, atb::SVector<atb::TensorDesc>&) const override {
    emu::not_emulated("ReshapeAndCacheOperation::InferShape");
  }
  uint32_t GetInputNum() const override { return 5; }
  uint32_t GetOutputNum() const override { return 2; }

  Status Setup(const atb::VariantPack& pack, uint64_t& workspace_size, atb::Context*) override {
    workspace_size = 0;
    if (int code = emu::injected_failure(kName)) return code;
    const atb::SVector<atb::Tensor>& in = pack.inTensors;
    for (int index : {0, 1}) {
      if (Status code = check_pair(in[index], in[index + 2])) return code;
    }
    const atb::TensorDesc &key = in[0].desc, &value = in[1].desc, &slots = in[4].desc;
    if (slots.shape.dimNum != 1) return emu::refuse(atb::kInvalidDimNum, "%s: slotMapping has one dimension", kName);
    if (slots.dtype != ACL_INT32) return emu::refuse(atb::kInvalidDtype, "%s: slotMapping is int32", kName);
    if (key.dtype != value.dtype) return emu::refuse(atb::kInvalidDtype, "%s: key and value differ in dtype", kName);
    bool fits = key.shape.dims[0] == value.shape.dims[0] && key.shape.dims[0] == slots.shape.dims[0] &&
                in[2].desc.shape.dims[0] == in[3].desc.shape.dims[0] && in[2].desc.shape.dims[1] == in[3].desc.shape.dims[1];
    if (!fits) return emu::refuse(atb::kInvalidDim, "%s: tokens, slots or blocks of key and value differ", kName);
    return atb::kDone;
  }

  Status Execute(const atb::VariantPack& pack, uint8_t*, uint64_t, atb::Context* context) override {
    const atb::SVector<atb::Tensor>& in = pack.inTensors;
    Rows keys(in[0], in[2]), values(in[1], in[3]);
    auto slots = static_cast<const int32_t*>(in[4].deviceData);
    int64_t block_size = in[2].desc.shape.dims[1];
    std::vector<std::pair<const void*, size_t>> ranges;
    for (int index = 0; index < 5; ++index) ranges.emplace_back(in[index].deviceData, in[index].dataSize);
    return emu::submit(context->GetExecuteStream(), kName, [=] {
      for (const auto& [address, bytes] : ranges) {
        if (bytes > 0 && !emu::is_device_range(address, bytes)) {
          throw emu::DeviceError(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, std::to_string(bytes) + " bytes are not device memory");
        }
      }
      check_slots(slots, keys.num_tokens, keys.num_slots, block_size);
      keys.write(slots);
      values.write(slots);
    });
  }

 private:
  // given (tokens, heads, head dim), cache (blocks, block size, heads, head dim)
  static Status check_pair(const atb::Tensor& given, const atb::Tensor& cache) {
    const atb::TensorDesc &from = given.desc, &to = cache.desc;
    bool is_type = from.dtype == ACL_FLOAT16 || from.dtype == ACL_BF16 || from.dtype == ACL_INT8;
    if (!is_type || from.dtype != to.dtype) {
      return emu::refuse(atb::kInvalidDtype, "%s: data types %d and %d: float16, bfloat16 or int8, the cache's too", kName,
                         static_cast<int>(from.dtype), static_cast<int>(to.dtype));
    }
    if (from.format != ACL_FORMAT_ND || to.format != ACL_FORMAT_ND) return emu::refuse(atb::kInvalidFormat, "%s: ND alone is emulated", kName);
    if (from.shape.dimNum != 3 || to.shape.dimNum != 4) {
      return emu::refuse(atb::kInvalidDimNum, "%s: tokens of 3 dimensions and a cache of 4", kName);
    }
    if (from.shape.dims[1] != to.shape.dims[2] || from.shape.dims[2] != to.shape.dims[3]) {
      return emu::refuse(atb::kInvalidDim, "%s: heads of the tokens are not the cache's", kName);
    }
    return atb::kDone;
  }
};

}  // namespace

#pragma GCC visibility push(default)
namespace atb {

template <class Param>
Status CreateOperation(const Param& param, Operation** operation);

template <>
Status CreateOperation(const infer::ReshapeAndCacheParam& param, Operation** operation) {
  if (param.compressType != 0 || param.kvCacheCfg != 0) {
    return emu::refuse(kInvalidParam, "%s: compressed caches, NZ caches and keys alone are not emulated", kName);
  }
  *operation = new ReshapeAndCache();
  return kDone;
}

Status DestroyOperation(Operation* operation) {
  delete operation;
  return kDone;
}

Status CreateContext(Context** context) {
  *context = new StreamContext();
  return kDone;
}

Status DestroyContext(Context* context) {
  delete context;
  return kDone;
}

uint64_t Utils::GetTensorSize(const Tensor& tensor) {
  uint64_t bytes = bytes_of(tensor.desc.dtype);
  for (uint64_t dim = 0; dim < tensor.desc.shape.dimNum; ++dim) bytes *= tensor.desc.shape.dims[dim];
  return bytes;
}

}  // namespace atb
#pragma GCC visibility pop

// The old route, to which torch_npu falls back without a word when an aclnn symbol is missing. One operator is emulated on it:
// Identity, which moves a tensor between plain and fractal layouts (npu_format_cast before CANN 9.1). All others are refused by name.
#include <algorithm>
#include <cstring>
#include <utility>

#include "emulation.h"

using emu::refuse;

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> shape;    // as a program sees it
  aclFormat format;              // how it lies
  std::vector<int64_t> storage;  // its shape as it lies
};
struct aclDataBuffer {
  char* data;
  size_t bytes;
};
struct aclopAttr {};

namespace {

constexpr int64_t kRows = 16, kBlockBytes = 32, kMostItemBytes = 2;

bool is_plain(aclFormat format) { return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NCL || format == ACL_FORMAT_NCDHW; }

int64_t item_bytes(aclDataType type) {
  switch (type) {
    case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: return 2;
    case ACL_FLOAT: case ACL_INT32: return 4;
    default: return 0;
  }
}

int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step; }

// FRACTAL_NZ: matrices of (rows, columns) in blocks of 16 rows and 32 bytes (or 16 items of 4 bytes), row by row within a block; blocks
// lie column by column. What pads the last blocks is zero.
struct Fractal {
  int64_t count = 1, rows, columns, width, item;

  explicit Fractal(const aclTensorDesc& plain) : item(item_bytes(plain.type)) {
    size_t last = plain.shape.size() - 1;
    for (size_t dim = 0; dim + 1 < last; ++dim) count *= plain.shape[dim];
    rows = plain.shape[last - 1];
    columns = plain.shape[last];
    width = kBlockBytes / std::min(item, kMostItemBytes);
  }
  int64_t size() const { return up(rows, kRows) * kRows * up(columns, width) * width; }
  int64_t place(int64_t row, int64_t column) const {
    return ((column / width * up(rows, kRows) + row / kRows) * kRows + row % kRows) * width + column % width;
  }
  void move(char* fractal, char* plain, bool is_to_plain) const {
    if (!is_to_plain) std::memset(fractal, 0, count * size() * item);
    for (int64_t matrix = 0; matrix < count; ++matrix) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          char* inside = fractal + (matrix * size() + place(row, column)) * item;
          char* outside = plain + ((matrix * rows + row) * columns + column) * item;
          std::memcpy(is_to_plain ? outside : inside, is_to_plain ? inside : outside, item);
        }
      }
    }
  }
};

aclError cast_format(const aclTensorDesc& from, const aclDataBuffer& source, const aclTensorDesc& to, const aclDataBuffer& target, aclrtStream stream) {
  if (is_plain(from.format) && is_plain(to.format) && source.bytes == target.bytes) {  // a cast that was not allowed
    return emu::submit(stream, "Identity", [from = source.data, to = target.data, bytes = target.bytes] { std::memmove(to, from, bytes); });
  }
  bool is_to_plain = from.format == ACL_FORMAT_FRACTAL_NZ && is_plain(to.format);
  if (!is_to_plain && !(is_plain(from.format) && to.format == ACL_FORMAT_FRACTAL_NZ)) {
    return refuse(ACL_ERROR_GE_FAILURE, "operator Identity from format %d to %d: plain ones and FRACTAL_NZ are emulated", from.format, to.format);
  }
  if (from.type != to.type || from.shape != to.shape || from.shape.size() < 2) {
    return refuse(ACL_ERROR_GE_FAILURE, "operator Identity: both sides have the same type and shape, of two dimensions or more");
  }
  if (item_bytes(from.type) == 0) return refuse(ACL_ERROR_GE_FAILURE, "operator Identity: data type %d is not emulated", from.type);
  Fractal fractal(from);
  const aclDataBuffer &inside = is_to_plain ? source : target, &outside = is_to_plain ? target : source;
  std::vector<int64_t> blocks = {up(fractal.columns, fractal.width), up(fractal.rows, kRows), kRows, fractal.width};
  const std::vector<int64_t>& storage = is_to_plain ? from.storage : to.storage;
  if (storage.size() < blocks.size() || !std::equal(blocks.rbegin(), blocks.rend(), storage.rbegin())) {
    return refuse(ACL_ERROR_GE_FAILURE, "operator Identity: FRACTAL_NZ does not lie in blocks of 16 rows and %ld columns", fractal.width);
  }
  auto inside_bytes = static_cast<size_t>(fractal.count * fractal.size() * fractal.item);
  auto outside_bytes = static_cast<size_t>(fractal.count * fractal.rows * fractal.columns * fractal.item);
  for (const auto& [buffer, bytes] : {std::pair{&inside, inside_bytes}, std::pair{&outside, outside_bytes}}) {
    if (buffer->bytes < bytes || !emu::is_device_range(buffer->data, bytes)) {
      return refuse(ACL_ERROR_GE_FAILURE, "operator Identity: %zu bytes are wanted, %zu given", bytes, buffer->bytes);
    }
  }
  return emu::submit(stream, "Identity", [fractal, within = inside.data, without = outside.data, is_to_plain] {
    fractal.move(within, without, is_to_plain);
  });
}

}  // namespace

EMU_EXPORT aclError aclopCompileAndExecute(const char* type, int num_inputs, const aclTensorDesc* const inputs[], const aclDataBuffer* const sources[],
                                           int num_outputs, const aclTensorDesc* const outputs[], aclDataBuffer* const targets[], const aclopAttr*,
                                           aclopEngineType, aclopCompileType, const char*, aclrtStream stream) {
  if (std::string(type) == "Identity" && num_inputs == 1 && num_outputs == 1) return cast_format(*inputs[0], *sources[0], *outputs[0], *targets[0], stream);
  return refuse(ACL_ERROR_GE_FAILURE, "operator %s took the aclop route: some aclnn function of it is not emulated", type);
}

EMU_EXPORT aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                             aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                             aclrtStream) {
  return refuse(ACL_ERROR_GE_FAILURE, "operator %s took the aclop route: some aclnn function of it is not emulated", type);
}

EMU_EXPORT aclTensorDesc* aclCreateTensorDesc(aclDataType type, int num_dims, const int64_t* dims, aclFormat format) {
  std::vector<int64_t> shape(dims, dims + num_dims);
  return new aclTensorDesc{type, shape, format, shape};
}
EMU_EXPORT void aclDestroyTensorDesc(const aclTensorDesc* description) { delete description; }
EMU_EXPORT aclError aclSetTensorFormat(aclTensorDesc* description, aclFormat format) {
  description->format = format;
  return ACL_SUCCESS;
}
EMU_EXPORT aclError aclSetTensorShape(aclTensorDesc* description, int num_dims, const int64_t* dims) {
  description->storage.assign(dims, dims + num_dims);
  return ACL_SUCCESS;
}
EMU_EXPORT aclDataType aclGetTensorDescType(const aclTensorDesc* description) { return description->type; }
EMU_EXPORT aclFormat aclGetTensorDescFormat(const aclTensorDesc* description) { return description->format; }
EMU_EXPORT size_t aclGetTensorDescNumDims(const aclTensorDesc* description) { return description->shape.size(); }
EMU_EXPORT aclError aclGetTensorDescDimV2(const aclTensorDesc* description, size_t dim, int64_t* size) {
  if (dim >= description->shape.size()) return refuse(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: dimension %zu", dim);
  *size = description->shape[dim];
  return ACL_SUCCESS;
}
EMU_EXPORT aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{static_cast<char*>(data), bytes}; }
EMU_EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}
EMU_EXPORT aclopAttr* aclopCreateAttr() { return new aclopAttr; }
EMU_EXPORT void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }

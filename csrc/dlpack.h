// What a tensor is, asked of its library by a C function: the part of DLPack's C exchange that is used here.
// Source: dmlc.github.io/dlpack, ABI version 1. A tensor's type has the table in its attribute
// __dlpack_c_exchange_api__ (torch from 2.10 on), a capsule of kCapsuleName.
#pragma once
#include <cstdint>

namespace onetrip::dlpack {

constexpr char kAttribute[] = "__dlpack_c_exchange_api__", kCapsuleName[] = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;
enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t { kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6 };

struct Tensor {
  void* data;
  int32_t device_type, device_index;
  int32_t n_dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *sizes, *strides;  // the tensor's own, in elements; null strides: contiguous
  uint64_t byte_offset;

  void* address() const { return static_cast<char*>(data) + byte_offset; }
  int64_t n_elements() const {
    int64_t n = 1;
    for (int i = 0; i < n_dims; ++i) n *= sizes[i];
    return n;
  }
  bool is_on_device_of(const Tensor& other) const {
    return device_type == other.device_type && device_index == other.device_index;
  }
};

struct ExchangeApi {
  uint32_t major_version, minor_version;
  const ExchangeApi* older;
  void (*allocate_managed)();
  void (*managed_from_object)();
  void (*object_from_managed)();
  int (*tensor_from_object)(void* object, Tensor* tensor);  // borrows; may be null; not 0: a Python error is set
  void (*current_work_stream)();
};

}  // namespace onetrip::dlpack

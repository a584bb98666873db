// The part of XLA's foreign function interface (xla/ffi/api/c_api.h, version 0.x, from jaxlib) that this library uses.
// The declarations are here so that building needs no JAX. tests/frameworks/jax/test_jax.py compares them with the
// installed header. XLA only appends members to these structures, and each structure records its own size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring::jax {

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

struct Metadata {
  size_t struct_size;
  Version api_version;
  uint32_t traits;
  int64_t state_type_id;
};

struct MetadataExtension {
  Extension extension_base;
  Metadata* metadata;
};

struct ErrorCreateArgs {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  int errc;
};

struct Error;

struct ErrorTextArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
  const char* message;  // written by XLA; valid as long as the error
};

struct StreamGetArgs {
  size_t struct_size;
  Extension* extension_start;
  void* ctx;
  void* stream;  // written by XLA: on CUDA, a CUstream
};

struct FfiApi {
  size_t struct_size;
  Extension* extension_start;
  Version api_version;
  const void* internal_api;
  Error* (*XLA_FFI_Error_Create)(ErrorCreateArgs*);
  void (*XLA_FFI_Error_GetMessage)(ErrorTextArgs*);
  const void* XLA_FFI_Error_Destroy;
  const void* XLA_FFI_Handler_Register;
  Error* (*XLA_FFI_Stream_Get)(StreamGetArgs*);
};

struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {  // XLA_FFI_Args and XLA_FFI_Rets
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  void** args;
};

struct ByteSpan {
  const char* ptr;
  size_t len;
};

struct Attributes {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  ByteSpan** names;
  void** attrs;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const FfiApi* api;
  void* ctx;
  int stage;
  Buffers args;
  Buffers rets;
  Attributes attrs;
  void* future;
};

constexpr int kMetadataExtension = 1;
constexpr int kExecute = 3;

}  // namespace multiring::jax

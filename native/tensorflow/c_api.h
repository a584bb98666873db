// The part of TensorFlow's C interface (tensorflow/c/{tf_status,tf_tensor,ops,kernels}.h) that this library uses. The
// functions are declared here and looked up at run time, so neither building nor loading this library needs TensorFlow.
// tests/frameworks/tensorflow/test_tensorflow_header.py compares these declarations with the headers of the installed version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring::tensorflow {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

using TF_Code = int;
using TF_DataType = int;
enum : TF_Code {
  TF_OK = 0,
  TF_CANCELLED = 1,
  TF_INVALID_ARGUMENT = 3,
  TF_DEADLINE_EXCEEDED = 4,
  TF_FAILED_PRECONDITION = 9,
  TF_ABORTED = 10,
  TF_UNIMPLEMENTED = 12,
  TF_INTERNAL = 13
};

using Infer = void (*)(TF_ShapeInferenceContext*, TF_Status*);
using Create = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using Delete = void (*)(void*);

// The functions in use: X(name, result, parameters).
#define MULTIRING_TENSORFLOW_FUNCTIONS(X)                                                                            \
  X(TF_NewStatus, TF_Status*, (void))                                                                                \
  X(TF_DeleteStatus, void, (TF_Status*))                                                                             \
  X(TF_SetStatus, void, (TF_Status*, TF_Code, const char*))                                                          \
  X(TF_GetCode, TF_Code, (const TF_Status*))                                                                         \
  X(TF_Message, const char*, (const TF_Status*))                                                                     \
  X(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                               \
  X(TF_RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                            \
  X(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                     \
  X(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                                    \
  X(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                                   \
  X(TF_OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                                      \
  X(TF_OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, Infer))                         \
  X(TF_NewShapeHandle, TF_ShapeHandle*, (void))                                                                      \
  X(TF_DeleteShapeHandle, void, (TF_ShapeHandle*))                                                                   \
  X(TF_ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                                         \
  X(TF_ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))           \
  X(TF_ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))          \
  X(TF_ShapeInferenceContextVectorFromSize, TF_ShapeHandle*, (TF_ShapeInferenceContext*, size_t))                    \
  X(TF_ShapeInferenceContextRankKnown, int, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                            \
  X(TF_ShapeInferenceContextRank, int64_t, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                             \
  X(TF_ShapeInferenceContextSubshape, void,                                                                          \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))                     \
  X(TF_ShapeInferenceContextConcatenateShapes, void,                                                                 \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))                      \
  X(TF_NewAsyncKernelBuilder, TF_KernelBuilder*, (const char*, const char*, Create, Compute, Delete))                \
  X(TF_RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                                    \
  X(TF_OpKernelConstruction_GetAttrSize, void,                                                                       \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                         \
  X(TF_OpKernelConstruction_GetAttrString, void, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*)) \
  X(TF_OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                                   \
  X(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                             \
  X(TF_NumInputs, int, (TF_OpKernelContext*))                                                                        \
  X(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                          \
  X(TF_AllocateOutput, TF_Tensor*, (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*)) \
  X(TF_RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                          \
  X(TF_TensorType, TF_DataType, (const TF_Tensor*))                                                                  \
  X(TF_NumDims, int, (const TF_Tensor*))                                                                             \
  X(TF_Dim, int64_t, (const TF_Tensor*, int))                                                                        \
  X(TF_TensorByteSize, size_t, (const TF_Tensor*))                                                                   \
  X(TF_TensorData, void*, (const TF_Tensor*))                                                                        \
  X(TF_DeleteTensor, void, (TF_Tensor*))

struct TensorFlowApi {
#define X(name, result, parameters) result(*name) parameters = nullptr;
  MULTIRING_TENSORFLOW_FUNCTIONS(X)
#undef X
};

}  // namespace multiring::tensorflow

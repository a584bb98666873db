// multiring's operations for TensorFlow: kernels for TensorFlow's C interface that use entry/multiring.h.
//
// The operations take arrays of one element type. Their results have the inputs' shapes (MultiringWhole), gathered rows
// (MultiringRows), scattered rows (MultiringScatter) or exchanged rows (MultiringExchange). The attribute `call` holds
// all other parameters as a line of text; see entry/call.h. The kernels are asynchronous: `compute` starts a request,
// and TensorFlow continues with operations that do not need its results.

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "c_api.h"
#include "entry/call.h"

namespace multiring::tensorflow {
namespace {

TensorFlowApi api;
std::string problem;  // why the operations are not available; empty if they are
std::atomic<MultiringEntry*> entry{nullptr};

constexpr TF_DataType kInt64 = 9;
// TensorFlow's type numbers (tensorflow/c/tf_datatype.h), in the order of multiring.h's types.
constexpr std::array<TF_DataType, 15> kTypes{10, 6, 5, 3, 9, 4, 17, 22, 23, 19, 14, 1, 2, 8, 18};
constexpr std::array<size_t, 15> kBytes{1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
// TensorFlow's error codes for multiring's errors, in the order of multiring.h.
constexpr std::array<TF_Code, 9> kCodes{TF_OK,
                                        TF_INVALID_ARGUMENT,
                                        TF_FAILED_PRECONDITION,
                                        TF_ABORTED,
                                        TF_DEADLINE_EXCEEDED,
                                        TF_FAILED_PRECONDITION,
                                        TF_UNIMPLEMENTED,
                                        TF_CANCELLED,
                                        TF_INTERNAL};

class OwnedStatus {
 public:
  OwnedStatus() : status_(api.TF_NewStatus()) {}
  ~OwnedStatus() { api.TF_DeleteStatus(status_); }
  OwnedStatus(const OwnedStatus&) = delete;
  OwnedStatus& operator=(const OwnedStatus&) = delete;
  operator TF_Status*() const { return status_; }
  bool ok() const { return api.TF_GetCode(status_) == TF_OK; }
  void set(TF_Code code, const std::string& text) { api.TF_SetStatus(status_, code, text.c_str()); }

 private:
  TF_Status* status_;
};

// A request in flight. It owns TensorFlow's objects until `done` is called.
class Flight {
 public:
  Flight(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      // `done` points to a std::function, an argument of TensorFlow's caller. It is copied, because it does not outlive
      // `compute`.
      : context_(context), done_(*reinterpret_cast<std::function<void()>*>(done)) {}
  ~Flight() {
    for (TF_Tensor* tensor : tensors_) api.TF_DeleteTensor(tensor);
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  bool start(const CallText& call) {
    const int inputs = api.TF_NumInputs(context_);
    const bool exchanges = call.collective == MULTIRING_ALL_TO_ALL;
    const int count = exchanges ? 1 : inputs;
    std::vector<MultiringArray> arrays(static_cast<size_t>(count));
    shapes_.resize(arrays.size());
    for (int i = 0; i < count; ++i) {
      const TF_Tensor* tensor = input(i);
      if (tensor == nullptr) return false;
      type_ = api.TF_TensorType(tensor);
      auto& shape = shapes_[static_cast<size_t>(i)];
      for (int dim = 0; dim < api.TF_NumDims(tensor); ++dim) shape.push_back(api.TF_Dim(tensor, dim));
    }
    int32_t type = 0;
    while (type < static_cast<int32_t>(kTypes.size()) && kTypes[static_cast<size_t>(type)] != type_) ++type;
    if (type == static_cast<int32_t>(kTypes.size())) {
      status_.set(TF_UNIMPLEMENTED, "multiring does not support tensors of TensorFlow's type " + std::to_string(type_));
      return false;
    }
    bytes_ = kBytes[static_cast<size_t>(type)];
    const bool is_whole = call.is_whole();
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      arrays[at] = {api.TF_TensorData(tensors_[at]), nullptr, shapes_[at].data(),
                    static_cast<int32_t>(shapes_[at].size())};
      if (is_whole && (arrays[at].output = output(i, type_, bytes_, shapes_[at])) == nullptr) return false;
    }
    MultiringRequest request = call.request();
    request.type = type;
    request.arrays = arrays.data();
    request.count = count;
    if (exchanges && inputs > 1) {
      const TF_Tensor* splits = input(1);
      if (splits == nullptr) return false;
      request.has_splits = 1;
      request.splits = static_cast<const int64_t*>(api.TF_TensorData(splits));
      request.split_count = static_cast<int32_t>(api.TF_TensorByteSize(splits) / sizeof(int64_t));
    }
    request.wants_rows = is_whole || call.collective == MULTIRING_REDUCE_SCATTER ? 0 : 1;
    results_ = count;
    request.allocate = [](void* data, int32_t array, const int64_t* shape, int32_t dims) {
      return static_cast<Flight*>(data)->allocate(array, {shape, shape + dims});
    };
    request.done = [](void* data, int32_t error, const char* text) { static_cast<Flight*>(data)->end(error, text); };
    request.data = this;
    MultiringEntry* to = entry.load();
    if (to == nullptr) {
      status_.set(TF_FAILED_PRECONDITION,
                  "multiring is not loaded in this process: import multiring.tensorflow before running this graph");
      return false;
    }
    to->start(to->self, &request);  // the request may have ended and deleted this object
    return true;
  }

  void fail() {
    api.TF_OpKernelContext_Failure(context_, status_);
    const auto done = std::move(done_);
    delete this;
    done();
  }

 private:
  const TF_Tensor* input(int index) {
    TF_Tensor* tensor = nullptr;
    api.TF_GetInput(context_, index, &tensor, status_);
    if (!status_.ok()) return nullptr;
    tensors_.push_back(tensor);
    return tensor;
  }

  void* output(int index, TF_DataType type, size_t each, const std::vector<int64_t>& shape) {
    size_t bytes = each;
    for (const int64_t dim : shape) bytes *= static_cast<size_t>(dim);
    TF_Tensor* tensor =
        api.TF_AllocateOutput(context_, index, type, shape.data(), static_cast<int>(shape.size()), bytes, status_);
    if (!status_.ok() || tensor == nullptr) return nullptr;
    tensors_.push_back(tensor);
    void* data = api.TF_TensorData(tensor);
    return data != nullptr || bytes != 0 ? data : &nothing_;
  }

  void* allocate(int32_t array, const std::vector<int64_t>& shape) {
    return array < results_ ? output(array, type_, bytes_, shape) : output(array, kInt64, sizeof(int64_t), shape);
  }

  void end(int32_t error, const char* text) {
    if (error != MULTIRING_OK) {
      status_.set(kCodes[static_cast<size_t>(error) < kCodes.size() ? static_cast<size_t>(error) : kCodes.size() - 1],
                  text);
      fail();
      return;
    }
    const auto done = std::move(done_);
    delete this;  // releases the tensors before TensorFlow ends the operation
    done();
  }

  TF_OpKernelContext* const context_;
  std::function<void()> done_;
  OwnedStatus status_;
  std::vector<TF_Tensor*> tensors_;
  std::vector<std::vector<int64_t>> shapes_;
  TF_DataType type_ = 0;
  size_t bytes_ = 0;
  int results_ = 0;
  char nothing_ = 0;
};

void* create(TF_OpKernelConstruction* construction) {
  const OwnedStatus status;
  int32_t list = 0, size = 0;
  api.TF_OpKernelConstruction_GetAttrSize(construction, "call", &list, &size, status);
  std::string text(static_cast<size_t>(size < 0 ? 0 : size), '\0');
  if (status.ok()) api.TF_OpKernelConstruction_GetAttrString(construction, "call", text.data(), text.size(), status);
  auto call = std::make_unique<CallText>();
  if (status.ok() && !call->parse(text))
    api.TF_SetStatus(status, TF_INVALID_ARGUMENT,
                     ("call=\"" + text + "\": want a call text made by multiring.tensorflow").c_str());
  if (!status.ok()) {
    api.TF_OpKernelConstruction_Failure(construction, status);
    return nullptr;
  }
  return call.release();
}

void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  auto* flight = new Flight(context, done);
  if (!flight->start(*static_cast<const CallText*>(kernel))) flight->fail();
}

void destroy(void* kernel) { delete static_cast<CallText*>(kernel); }

class Shape {
 public:
  Shape() : handle_(api.TF_NewShapeHandle()) {}
  ~Shape() { api.TF_DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < api.TF_ShapeInferenceContextNumInputs(context) && api.TF_GetCode(status) == TF_OK; ++i) {
    const Shape shape;
    api.TF_ShapeInferenceContextGetInput(context, i, shape, status);
    if (api.TF_GetCode(status) == TF_OK) api.TF_ShapeInferenceContextSetOutput(context, i, shape, status);
  }
}

// Sets the result shapes of the first `count` inputs: (?, ...) for an input of the shape (n, ...). It sets no shape for
// scalars, which the kernel rejects.
void rows_of(TF_ShapeInferenceContext* context, int count, TF_Status* status) {
  TF_ShapeHandle* some = api.TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1));
  for (int i = 0; i < count && api.TF_GetCode(status) == TF_OK; ++i) {
    const Shape shape, behind, found;
    api.TF_ShapeInferenceContextGetInput(context, i, shape, status);
    if (api.TF_GetCode(status) != TF_OK || api.TF_ShapeInferenceContextRankKnown(context, shape) == 0) continue;
    if (api.TF_ShapeInferenceContextRank(context, shape) < 1) continue;
    api.TF_ShapeInferenceContextSubshape(context, shape, 1, INT64_MAX, behind, status);
    if (api.TF_GetCode(status) == TF_OK)
      api.TF_ShapeInferenceContextConcatenateShapes(context, some, behind, found, status);
    if (api.TF_GetCode(status) == TF_OK) api.TF_ShapeInferenceContextSetOutput(context, i, found, status);
  }
  api.TF_DeleteShapeHandle(some);
}

void shapes_of_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  rows_of(context, static_cast<int>(api.TF_ShapeInferenceContextNumInputs(context)), status);
}

void shape_of_exchange(TF_ShapeInferenceContext* context, TF_Status* status) { rows_of(context, 1, status); }

constexpr const char* kTypeAttribute =
    "T: {bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, half, bfloat16, float, double, complex64, "
    "complex128}";

void register_operation(const char* name, const std::vector<const char*>& inputs,
                        const std::vector<const char*>& outputs, bool is_list, Infer infer) {
  const OwnedStatus status;
  TF_OpDefinitionBuilder* builder = api.TF_NewOpDefinitionBuilder(name);
  api.TF_OpDefinitionBuilderAddAttr(builder, "call: string");
  api.TF_OpDefinitionBuilderAddAttr(builder, kTypeAttribute);
  if (is_list) api.TF_OpDefinitionBuilderAddAttr(builder, "N: int >= 1");
  for (const char* input : inputs) api.TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : outputs) api.TF_OpDefinitionBuilderAddOutput(builder, output);
  // Other ranks depend on each operation, so TensorFlow must not fold, merge or remove any.
  api.TF_OpDefinitionBuilderSetIsStateful(builder, true);
  api.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, infer);
  api.TF_RegisterOpDefinition(builder, status);
  if (status.ok()) {
    api.TF_RegisterKernelBuilder(name, api.TF_NewAsyncKernelBuilder(name, "CPU", &create, &compute, &destroy), status);
  }
  if (!status.ok()) problem = api.TF_Message(status);
}

__attribute__((constructor)) void load() {
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    problem = "TensorFlow is not loaded in this process (no libtensorflow_framework.so.2)";
    return;
  }
#define X(name, result, parameters)                                                       \
  api.name = reinterpret_cast<result(*) parameters>(dlsym(library, #name));               \
  if (api.name == nullptr) problem = "this TensorFlow has no " #name " in its C interface";
  MULTIRING_TENSORFLOW_FUNCTIONS(X)
#undef X
  if (!problem.empty()) return;
  register_operation("MultiringWhole", {"values: N * T"}, {"results: N * T"}, true, &same_shapes);
  register_operation("MultiringRows", {"values: N * T"}, {"results: N * T", "rows: N * int64"}, true, &shapes_of_rows);
  register_operation("MultiringScatter", {"values: N * T"}, {"results: N * T"}, true, &shapes_of_rows);
  register_operation("MultiringExchange", {"values: T", "splits: int64"}, {"results: T", "rows: int64"}, false,
                     &shape_of_exchange);
}

}  // namespace
}  // namespace multiring::tensorflow

extern "C" {

// Makes the operations submit their requests to `entry`. Returns an empty text, or the reason why there are no
// operations.
__attribute__((visibility("default"))) const char* multiring_tensorflow_use(MultiringEntry* entry) {
  if (entry->version != MULTIRING_ENTRY_VERSION) return "this library and multiring's core have different versions";
  multiring::tensorflow::entry = entry;
  return multiring::tensorflow::problem.c_str();
}

}  // extern "C"

// Host memory for the arrays of a call whose memory is on a CUDA device, and the copies in both directions.
//
// The driver is loaded when a program first runs on a device, so that neither building nor CPU programs need CUDA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ffi.h"

namespace multiring::jax {

struct PinnedBlock;

// The host's copies of one call's arrays. Later calls on the same stream use their pinned memory again: they first wait
// for the stream, and so for the last copies of this call.
class DeviceArrays {
 public:
  // `stream`: the stream on which XLA runs the program.
  explicit DeviceArrays(void* stream) : stream_(stream) {}
  ~DeviceArrays();
  DeviceArrays(const DeviceArrays&) = delete;
  DeviceArrays& operator=(const DeviceArrays&) = delete;

  // Copies the inputs to the host behind all earlier work of the stream, waits for the copies, and replaces the
  // addresses in `inputs` and `results` by those of host memory. Returns an empty text, or what failed.
  std::string begin(std::vector<Buffer>& inputs, std::vector<Buffer>& results);

  // Starts to copy the results to the device. Later work of the stream is ordered behind the copies.
  std::string finish();

 private:
  std::string take(size_t bytes, PinnedBlock*& block);
  std::string copy_inputs(std::vector<Buffer>& inputs);

  struct Result {
    void* device;
    PinnedBlock* block;
    size_t bytes;
  };
  void* stream_;
  std::vector<PinnedBlock*> blocks_;
  std::vector<Result> results_;
};

}  // namespace multiring::jax

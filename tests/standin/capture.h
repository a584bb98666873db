// Captures of streams, and the graphs that they make.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "stream.h"

namespace standin {

// Makes the work of one captured call, when the graph is launched.
using WorkMaker = std::function<Work()>;

struct Graph {
  std::vector<WorkMaker> nodes;  // in the order of the program, in which a launch runs them
};

enum class CaptureMode { global = 0, of_thread = 1, relaxed = 2 };

// How many calls of each stream lie before a point of a capture.
using CaptureClock = std::map<const Stream*, size_t>;

class Capture {
 public:
  Capture(const Stream* origin, CaptureMode mode);

  uint64_t id() const { return id_; }
  CaptureMode mode() const { return mode_; }
  std::thread::id thread() const { return thread_; }
  const Stream* origin() const { return origin_; }
  bool is_valid();
  void invalidate();

  void add(const Stream* stream, WorkMaker maker);
  CaptureClock clock(const Stream* stream);
  void join(const Stream* stream, const CaptureClock& before);
  bool has(const Stream* stream);
  bool is_joined();  // whether the first stream has waited for the calls of all others
  Graph graph();

 private:
  const uint64_t id_;
  const Stream* const origin_;
  const CaptureMode mode_;
  const std::thread::id thread_;
  std::mutex mutex_;
  bool is_valid_ = true;
  Graph graph_;
  std::map<const Stream*, CaptureClock> clocks_;
};
using CapturePointer = std::shared_ptr<Capture>;

// The captures of the process that have not ended.
class Captures {
 public:
  int begin(const Stream* stream, CaptureMode mode);
  int end(const Stream* stream, Graph** made);
  CapturePointer of(const Stream* stream);
  bool has(const CapturePointer& capture);  // whether it has not ended
  // Returns the error of a call that captures forbid, which spoils them; else 0. A null stream: no capture's own.
  int refuse(const Stream* stream = nullptr);

  static CaptureMode exchange(CaptureMode mode);  // of the calling thread

 private:
  std::mutex mutex_;
  std::set<CapturePointer> all_;
};

Captures& captures();

}  // namespace standin

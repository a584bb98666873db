// Owned file descriptors that a forked child closes automatically.
//
// Data-loader workers fork without exec. An inherited socket would keep a dead rank's connection open, and the peers
// would not detect the death. Therefore a Descriptor owns every descriptor of the core, and one fork handler closes all
// of them in the child. The table is global because a fork affects the whole process.
#pragma once

#include <cstdint>

namespace multiring {

// Records which process created an object. If the process forks later, the child's copy is inherited: the resource
// behind the object belongs to the parent. Objects that the child creates itself are not inherited.
class Origin {
 public:
  Origin();
  bool is_inherited() const;

 private:
  uint64_t forks_;  // number of forks between the first process and the creating process
};

// Owns a file descriptor. Destruction and `reset` close it, except in a forked child, where it is already closed.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  Origin origin_;
};

}  // namespace multiring

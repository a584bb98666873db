// Owned file descriptors that a forked child closes by itself.
//
// Data-loader workers fork without exec: an inherited socket would keep a dead rank's connection
// open, and its death unseen. Every descriptor of the core is therefore owned by a Descriptor, and
// one handler, run in the child, closes them all. The table is global because fork is.
#pragma once

#include <cstdint>

namespace multiring {

// Which process made an object: a child that was forked since has inherited it, and what it stands for is the parent's.
// What the child makes itself is its own, like a rank's after its parent has left the job.
class Origin {
 public:
  Origin();
  bool is_inherited() const;

 private:
  uint64_t forks_;  // between this process and the first
};

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

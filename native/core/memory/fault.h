// The kinds of error the core reports; each maps to one class of multiring/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace multiring {

enum class FaultKind : uint8_t { none, argument, mismatch, peer_lost, stall, state, rendezvous };

class Fault : public std::runtime_error {
 public:
  Fault(FaultKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  FaultKind kind() const { return kind_; }

 private:
  FaultKind kind_;
};

// Throws a Fault of `kind` with the text "CALL: reason (errno N)". The caller must not change errno before this call.
[[noreturn]] void throw_errno(FaultKind kind, const std::string& call);

}  // namespace multiring

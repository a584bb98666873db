// What the kernel has seen a connection carry.
#pragma once

#include <cstdint>

namespace multiring {

// Bytes per second that the connection's other side took lately, while it was given enough; 0: not known.
uint64_t goodput_of(int socket);

}  // namespace multiring

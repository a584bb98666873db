// The throughput of a connection, as the kernel measured it.
#pragma once

#include <cstdint>

namespace multiring {

// Returns the bytes per second that the peer recently acknowledged while this side had enough to send; 0 if unknown.
uint64_t goodput_of(int socket);

}  // namespace multiring

// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104). Handshakes use them to prove that both ends belong to the job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace multiring {

using Sha256 = std::array<uint8_t, 32>;

Sha256 sha256(std::string_view message);
Sha256 hmac_sha256(std::string_view key, std::string_view message);
bool equal_in_constant_time(const Sha256& a, const Sha256& b);
std::array<uint8_t, 16> random_nonce();  // random bytes from the kernel; throws Fault::state

}  // namespace multiring

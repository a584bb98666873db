// Encryption and authentication of one direction of a connection, and the key exchange before it.
//
// A record's nonce is its number in its direction. Both directions of every connection have keys of their own, which
// are derived from an X25519 exchange with fresh keys. A Seal counts its records itself and cannot be copied. So no two
// records have the same key and nonce. Decision 0156 gives the argument.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "crypto_library.h"

namespace multiring {

enum class SealCipher : uint8_t { aes_256_gcm = 'A', chacha20_poly1305 = 'C' };

// Returns the cipher that is fast on this machine: AES if the processor has instructions for it.
SealCipher preferred_cipher();

using SealKey = std::array<uint8_t, 32>;

// Seals records, or opens them; one object does one of the two. Not thread-safe.
class Seal {
 public:
  static constexpr size_t kTagBytes = 16;
  // A key is replaced after this many records, so that the bounds on data under one key hold for every job.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 24;
  enum class Way : uint8_t { seals, opens };

  // Throws Fault::state if the library does not offer the cipher.
  Seal(Way way, SealCipher cipher, const SealKey& key, uint64_t records_per_key = kRecordsPerKey);

  // Encrypts the next record, whose plain bytes lie in `parts`, to `out`: the same number of bytes and the tag. `head`
  // is authenticated, but not encrypted. Returns false if the library fails; then `out` must not be sent.
  bool seal(std::span<const std::byte> head, std::span<const std::span<const std::byte>> parts, std::byte* out);
  // Decrypts the next record to `out`, which may be `sealed`. Returns false if the record is not the one that the other
  // end sealed next; then the bytes at `out` must not be used, and no further record can be opened.
  bool open(std::span<const std::byte> head, std::span<const std::byte> sealed, std::byte* out);
  uint64_t number() const { return number_; }  // the number of the next record

 private:
  struct Free {
    void operator()(void* context) const { CryptoLibrary::load().EVP_CIPHER_CTX_free(context); }
  };
  bool start_key();
  bool start_record(std::span<const std::byte> head);
  bool update(uint8_t* out, std::span<const std::byte> in) const;

  const CryptoLibrary& library_;
  const Way way_;
  const SealCipher cipher_;
  const uint64_t records_per_key_;
  SealKey key_;
  std::unique_ptr<void, Free> context_;
  uint64_t number_ = 0;
  bool has_failed_ = false;
};

struct SealPair {
  std::unique_ptr<Seal> out;
  std::unique_ptr<Seal> in;
};

// One end of an X25519 exchange. Its private key exists only in this object.
class KeyExchange {
 public:
  static constexpr size_t kOfferBytes = 33;  // the preferred cipher and the public key

  KeyExchange();  // throws Fault::state if the library cannot exchange keys
  const std::string& offer() const { return offer_; }
  // Returns the seals of both directions. `theirs` is the other end's offer; `transcript` lists everything that both
  // ends authenticated, and includes both offers; `calls` differs between the ends. Throws Fault::state if `theirs` is
  // no offer.
  SealPair seals(const std::string& theirs, const std::string& secret, const std::string& transcript, bool calls) const;

 private:
  struct FreeKey {
    void operator()(void* key) const { CryptoLibrary::load().EVP_PKEY_free(key); }
  };
  std::string shared_with(const std::string& public_key) const;

  std::unique_ptr<void, FreeKey> key_;
  std::string offer_;
};

// Derives 32 bytes by HKDF-SHA256 (RFC 5869).
SealKey hkdf_sha256(const std::string& salt, const std::string& key_material, const std::string& info);

}  // namespace multiring

// OpenSSL's libcrypto, loaded at run time. Only sealed connections need it, so the core does not link it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace multiring {

// The functions of libcrypto that sealing calls, with libcrypto's own names. Their types are declared here, because
// OpenSSL's headers may be missing where the core is built. The functions exist since OpenSSL 1.1.1.
struct CryptoLibrary {
  using CipherContext = void;
  using Cipher = void;
  using Key = void;
  using KeyContext = void;

  unsigned long (*OpenSSL_version_num)();
  const char* (*OpenSSL_version)(int kind);
  const Cipher* (*EVP_aes_256_gcm)();
  const Cipher* (*EVP_chacha20_poly1305)();
  CipherContext* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(CipherContext*);
  int (*EVP_CIPHER_CTX_ctrl)(CipherContext*, int command, int size, void* data);
  int (*EVP_CipherInit_ex)(CipherContext*, const Cipher*, void* engine, const uint8_t* key, const uint8_t* nonce,
                           int encrypts);
  int (*EVP_CipherUpdate)(CipherContext*, uint8_t* out, int* out_size, const uint8_t* in, int in_size);
  int (*EVP_CipherFinal_ex)(CipherContext*, uint8_t* out, int* out_size);
  Key* (*EVP_PKEY_new_raw_private_key)(int type, void* engine, const uint8_t* key, size_t size);
  Key* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const uint8_t* key, size_t size);
  int (*EVP_PKEY_get_raw_public_key)(const Key*, uint8_t* key, size_t* size);
  void (*EVP_PKEY_free)(Key*);
  KeyContext* (*EVP_PKEY_CTX_new)(Key*, void* engine);
  void (*EVP_PKEY_CTX_free)(KeyContext*);
  int (*EVP_PKEY_derive_init)(KeyContext*);
  int (*EVP_PKEY_derive_set_peer)(KeyContext*, Key* peer);
  int (*EVP_PKEY_derive)(KeyContext*, uint8_t* shared, size_t* size);

  // Loads the library at `path`, or the system's libcrypto if `path` is empty. The process keeps the first library that
  // could be loaded; later calls return it. Throws Fault::state if the library is missing or too old. Thread-safe.
  static const CryptoLibrary& load(const std::string& path = "");
  std::string version() const;
};

}  // namespace multiring

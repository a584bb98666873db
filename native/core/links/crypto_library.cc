#include "crypto_library.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <vector>

#include "memory/fault.h"

namespace multiring {
namespace {

constexpr unsigned long kOldest = 0x10101000UL;  // OpenSSL 1.1.1, the first version with raw X25519 keys
constexpr const char* kAdvice =
    "MULTIRING_SEAL=1 needs libcrypto of OpenSSL 1.1.1 or later; install it, or name it with MULTIRING_SEAL_LIBRARY";

template <typename Function>
void find(void* handle, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function != nullptr) return;
  throw Fault(FaultKind::state, path + " has no function " + name + ": " + kAdvice);
}

std::unique_ptr<const CryptoLibrary> library_of(void* handle, const std::string& path) {
  auto made = std::make_unique<CryptoLibrary>();
  find(handle, path, "OpenSSL_version_num", made->OpenSSL_version_num);
  const unsigned long version = made->OpenSSL_version_num();
  if (version < kOldest) {
    throw Fault(FaultKind::state, path + " is too old (its version number is " + std::to_string(version) +
                                      ", want at least " + std::to_string(kOldest) + "): " + kAdvice);
  }
#define MULTIRING_FIND(name) find(handle, path, #name, made->name)
  MULTIRING_FIND(OpenSSL_version);
  MULTIRING_FIND(EVP_aes_256_gcm);
  MULTIRING_FIND(EVP_chacha20_poly1305);
  MULTIRING_FIND(EVP_CIPHER_CTX_new);
  MULTIRING_FIND(EVP_CIPHER_CTX_free);
  MULTIRING_FIND(EVP_CIPHER_CTX_ctrl);
  MULTIRING_FIND(EVP_CipherInit_ex);
  MULTIRING_FIND(EVP_CipherUpdate);
  MULTIRING_FIND(EVP_CipherFinal_ex);
  MULTIRING_FIND(EVP_PKEY_new_raw_private_key);
  MULTIRING_FIND(EVP_PKEY_new_raw_public_key);
  MULTIRING_FIND(EVP_PKEY_get_raw_public_key);
  MULTIRING_FIND(EVP_PKEY_free);
  MULTIRING_FIND(EVP_PKEY_CTX_new);
  MULTIRING_FIND(EVP_PKEY_CTX_free);
  MULTIRING_FIND(EVP_PKEY_derive_init);
  MULTIRING_FIND(EVP_PKEY_derive_set_peer);
  MULTIRING_FIND(EVP_PKEY_derive);
#undef MULTIRING_FIND
  return made;
}

std::unique_ptr<const CryptoLibrary> open(const std::string& path) {
  const std::vector<std::string> names =
      path.empty() ? std::vector<std::string>{"libcrypto.so.3", "libcrypto.so.1.1"} : std::vector<std::string>{path};
  std::string why;
  for (const std::string& name : names) {
    // The handle is never closed: libcrypto registers functions that run at the end of the process.
    void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return library_of(handle, name);
    const char* error = ::dlerror();
    why += (why.empty() ? "" : "; ") + std::string(error != nullptr ? error : name.c_str());
  }
  throw Fault(FaultKind::state, "cannot load libcrypto (" + why + "): " + kAdvice);
}

}  // namespace

const CryptoLibrary& CryptoLibrary::load(const std::string& path) {
  static std::mutex mutex;
  static std::unique_ptr<const CryptoLibrary> loaded;
  const std::lock_guard lock(mutex);
  if (!loaded) loaded = open(path);
  return *loaded;
}

std::string CryptoLibrary::version() const { return OpenSSL_version(0); }

}  // namespace multiring

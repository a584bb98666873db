#include "seal.h"

#include <sys/random.h>

#include <bit>
#include <cstring>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "memory/digest.h"
#include "memory/fault.h"

namespace multiring {
namespace {

constexpr int kX25519 = 1034;  // EVP_PKEY_X25519
constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG
constexpr size_t kKeyBytes = 32;

[[noreturn]] void fail(const char* what) {
  throw Fault(FaultKind::state, std::string("libcrypto cannot ") + what + "; MULTIRING_SEAL=1 needs it");
}

std::string text_of(const Sha256& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

const uint8_t* bytes_of(const std::string& text) { return reinterpret_cast<const uint8_t*>(text.data()); }

}  // namespace

SealCipher preferred_cipher() {
#if defined(__x86_64__)
  const bool has_aes = __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kBoth = HWCAP_AES | HWCAP_PMULL;
  const bool has_aes = (::getauxval(AT_HWCAP) & kBoth) == kBoth;
#else
  const bool has_aes = false;
#endif
  return has_aes ? SealCipher::aes_256_gcm : SealCipher::chacha20_poly1305;
}

SealKey hkdf_sha256(const std::string& salt, const std::string& key_material, const std::string& info) {
  const Sha256 extracted = hmac_sha256(salt, key_material);
  return hmac_sha256(text_of(extracted), info + '\x01');
}

// ---- Seal ----------------------------------------------------------------------------------

Seal::Seal(Way way, SealCipher cipher, const SealKey& key, uint64_t records_per_key)
    : library_(CryptoLibrary::load()), way_(way), cipher_(cipher), records_per_key_(records_per_key), key_(key),
      context_(library_.EVP_CIPHER_CTX_new()) {
  if (!context_ || !start_key()) {
    fail(cipher == SealCipher::aes_256_gcm ? "encrypt with AES-256-GCM" : "encrypt with ChaCha20-Poly1305");
  }
}

bool Seal::start_key() {
  const bool is_aes = cipher_ == SealCipher::aes_256_gcm;
  const auto* cipher = is_aes ? library_.EVP_aes_256_gcm() : library_.EVP_chacha20_poly1305();
  const int encrypts = way_ == Way::seals ? 1 : 0;
  return cipher != nullptr &&
         library_.EVP_CipherInit_ex(context_.get(), cipher, nullptr, key_.data(), nullptr, encrypts) == 1;
}

// The nonce is the record's number, which is different for every record of this object. The key is this object's own.
bool Seal::start_record(std::span<const std::byte> head) {
  if (number_ == UINT64_MAX) return false;
  if (number_ > 0 && number_ % records_per_key_ == 0) {
    key_ = hkdf_sha256("", {reinterpret_cast<const char*>(key_.data()), key_.size()}, "multiring seal, next key");
    if (!start_key()) return false;
  }
  std::array<uint8_t, 12> nonce{};
  for (size_t i = 0; i < 8; ++i) nonce[4 + i] = static_cast<uint8_t>(number_ >> (56 - 8 * i));
  ++number_;
  return library_.EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
         update(nullptr, head);
}

bool Seal::update(uint8_t* out, std::span<const std::byte> in) const {
  int done = 0;
  return in.empty() || library_.EVP_CipherUpdate(context_.get(), out, &done, reinterpret_cast<const uint8_t*>(in.data()),
                                                 static_cast<int>(in.size())) == 1;
}

bool Seal::seal(std::span<const std::byte> head, std::span<const std::span<const std::byte>> parts, std::byte* out) {
  auto* at = reinterpret_cast<uint8_t*>(out);
  bool works = !has_failed_ && way_ == Way::seals && start_record(head);
  for (const auto& part : parts) {
    works = works && update(at, part);
    at += part.size();
  }
  int rest = 0;
  works = works && library_.EVP_CipherFinal_ex(context_.get(), at, &rest) == 1 &&
          library_.EVP_CIPHER_CTX_ctrl(context_.get(), kGetTag, kTagBytes, at) == 1;
  has_failed_ = !works;
  return works;
}

bool Seal::open(std::span<const std::byte> head, std::span<const std::byte> sealed, std::byte* out) {
  if (has_failed_ || way_ != Way::opens || sealed.size() < kTagBytes) return false;
  const size_t size = sealed.size() - kTagBytes;
  std::array<std::byte, kTagBytes> tag{};
  std::memcpy(tag.data(), sealed.data() + size, kTagBytes);
  std::array<uint8_t, kTagBytes> end{};
  int rest = 0;
  const bool is_right = start_record(head) && update(reinterpret_cast<uint8_t*>(out), sealed.first(size)) &&
                        library_.EVP_CIPHER_CTX_ctrl(context_.get(), kSetTag, kTagBytes, tag.data()) == 1 &&
                        library_.EVP_CipherFinal_ex(context_.get(), end.data(), &rest) == 1;
  has_failed_ = !is_right;
  return is_right;
}

// ---- KeyExchange ---------------------------------------------------------------------------

KeyExchange::KeyExchange() {
  const CryptoLibrary& library = CryptoLibrary::load();
  std::array<uint8_t, kKeyBytes> drawn{};
  if (::getrandom(drawn.data(), drawn.size(), 0) != static_cast<ssize_t>(drawn.size())) {
    throw_errno(FaultKind::state, "getrandom");
  }
  key_.reset(library.EVP_PKEY_new_raw_private_key(kX25519, nullptr, drawn.data(), drawn.size()));
  ::explicit_bzero(drawn.data(), drawn.size());
  std::array<uint8_t, kKeyBytes> known{};
  size_t size = known.size();
  if (!key_ || library.EVP_PKEY_get_raw_public_key(key_.get(), known.data(), &size) != 1 || size != known.size()) {
    fail("exchange keys by X25519");
  }
  offer_.push_back(static_cast<char>(preferred_cipher()));
  offer_.append(reinterpret_cast<const char*>(known.data()), known.size());
}

std::string KeyExchange::shared_with(const std::string& public_key) const {
  const CryptoLibrary& library = CryptoLibrary::load();
  const std::unique_ptr<void, FreeKey> theirs(
      library.EVP_PKEY_new_raw_public_key(kX25519, nullptr, bytes_of(public_key), public_key.size()));
  struct FreeContext {
    void operator()(void* context) const { CryptoLibrary::load().EVP_PKEY_CTX_free(context); }
  };
  const std::unique_ptr<void, FreeContext> context(library.EVP_PKEY_CTX_new(key_.get(), nullptr));
  std::string shared(kKeyBytes, '\0');
  size_t size = shared.size();
  // libcrypto rejects a public key that makes the shared bytes zero.
  if (!theirs || !context || library.EVP_PKEY_derive_init(context.get()) != 1 ||
      library.EVP_PKEY_derive_set_peer(context.get(), theirs.get()) != 1 ||
      library.EVP_PKEY_derive(context.get(), reinterpret_cast<uint8_t*>(shared.data()), &size) != 1 ||
      size != shared.size()) {
    throw Fault(FaultKind::state, "the peer's public key is invalid");
  }
  return shared;
}

SealPair KeyExchange::seals(const std::string& theirs, const std::string& secret, const std::string& transcript,
                            bool calls) const {
  if (theirs.size() != kOfferBytes || (theirs[0] != static_cast<char>(SealCipher::aes_256_gcm) &&
                                       theirs[0] != static_cast<char>(SealCipher::chacha20_poly1305))) {
    throw Fault(FaultKind::state, "the peer's key offer is invalid");
  }
  const bool both_have_aes = theirs[0] == offer_[0] && theirs[0] == static_cast<char>(SealCipher::aes_256_gcm);
  const SealCipher cipher = both_have_aes ? SealCipher::aes_256_gcm : SealCipher::chacha20_poly1305;
  const std::string salt = text_of(hmac_sha256(secret, "multiring seal 1\n" + transcript));
  const std::string shared = shared_with(theirs.substr(1));
  const SealKey from_caller = hkdf_sha256(salt, shared, "from the caller");
  const SealKey from_called = hkdf_sha256(salt, shared, "from the called end");
  return {std::make_unique<Seal>(Seal::Way::seals, cipher, calls ? from_caller : from_called),
          std::make_unique<Seal>(Seal::Way::opens, cipher, calls ? from_called : from_caller)};
}

}  // namespace multiring

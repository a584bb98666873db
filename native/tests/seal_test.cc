// Tests the seal of one direction of a connection, and the key exchange. Meant to run under ASan.

#include "core/links/seal.h"

#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "checks.h"
#include "core/memory/fault.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

constexpr const char* kSecret = "a secret of the job, long enough";

std::span<const std::byte> span_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string hex_of(const SealKey& key) {
  std::string text;
  for (const uint8_t byte : key) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", byte);
    text += pair;
  }
  return text;
}

std::string sealed_by(Seal& seal, const std::string& text) {
  std::string out(text.size() + Seal::kTagBytes, '\0');
  const auto part = span_of(text);
  check(seal.seal({}, {&part, 1}, reinterpret_cast<std::byte*>(out.data())), "a record is sealed");
  return out;
}

bool opens(Seal& seal, const std::string& sealed, const std::string& want) {
  std::string out(sealed.size() - Seal::kTagBytes, '\0');
  return seal.open({}, span_of(sealed), reinterpret_cast<std::byte*>(out.data())) && out == want;
}

void derives_keys() {
  // RFC 5869, test case 1, of whose output the first 32 bytes are compared.
  const std::string salt("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c", 13);
  const std::string info("\xf0\xf1\xf2\xf3\xf4\xf5\xf6\xf7\xf8\xf9", 10);
  check(hex_of(hkdf_sha256(salt, std::string(22, '\x0b'), info)) ==
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf",
        "HKDF derives the key of RFC 5869");
}

// The same text sealed twice, or under another key of the sequence, never looks the same: the nonce or the key differs.
void never_repeats(SealCipher cipher) {
  SealKey key{};
  key[0] = 7;
  constexpr uint64_t kRecords = 600;
  Seal out(Seal::Way::seals, cipher, key, 100);
  Seal in(Seal::Way::opens, cipher, key, 100);
  Seal late(Seal::Way::opens, cipher, key, UINT64_MAX);
  std::set<std::string> seen;
  std::vector<std::string> records;
  const std::string text(64, 'x');
  for (uint64_t i = 0; i < kRecords; ++i) {
    check(out.number() == i, "records are numbered in order");
    records.push_back(sealed_by(out, text));
    check(seen.insert(records.back().substr(0, 64)).second, "no two records have the same key and nonce");
    check(opens(in, records.back(), text), "a record is opened");
    check(opens(late, records.back(), text) == (i < 100), "a key is replaced after its records");
  }
  Seal again(Seal::Way::opens, cipher, key, 100);
  check(opens(again, records[0], text) && !opens(again, records[0], text), "a repeated record is rejected");
  check(!opens(again, records[1], text), "nothing is opened after a rejected record");
  Seal swapped(Seal::Way::opens, cipher, key, 100);
  check(!opens(swapped, records[1], text), "a record that overtook another is rejected");
  for (size_t bit = 0; bit < 8 * records[0].size(); ++bit) {
    Seal fresh(Seal::Way::opens, cipher, key, 100);
    std::string changed = records[0];
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    check(!opens(fresh, changed, text), "a record with a flipped bit is rejected");
  }
}

void exchanges_keys() {
  const KeyExchange caller;
  const KeyExchange called;
  const std::string transcript = caller.offer() + called.offer();
  const auto met = [&](const std::string& secret, const std::string& text) {
    SealPair a = caller.seals(called.offer(), kSecret, transcript, true);
    SealPair b = called.seals(caller.offer(), secret, text, false);
    const std::string there = sealed_by(*a.out, "there");
    const bool works = opens(*b.in, there, "there") && opens(*a.in, sealed_by(*b.out, "back"), "back");
    SealPair c = caller.seals(called.offer(), kSecret, transcript, true);
    check(!opens(*c.in, there, "there"), "a reflected record is rejected");
    return works;
  };
  check(met(kSecret, transcript), "both ends derive the same keys");
  check(!met("another secret, also long enough", transcript), "another secret derives other keys");
  check(!met(kSecret, transcript + "x"), "another transcript derives other keys");
  check(KeyExchange().offer() != KeyExchange().offer(), "every exchange draws fresh keys");
  for (const std::string& wrong : {std::string("A") + std::string(32, '\0'), std::string("X") + std::string(32, 'k'),
                                   std::string("A"), std::string()}) {
    bool refused = false;
    try {
      caller.seals(wrong, kSecret, transcript, true);
    } catch (const Fault&) {
      refused = true;
    }
    check(refused, "an invalid offer is rejected");
  }
}

}  // namespace

int main() {
  derives_keys();
  for (const SealCipher cipher : {SealCipher::aes_256_gcm, SealCipher::chacha20_poly1305}) never_repeats(cipher);
  exchanges_keys();
  return result();
}

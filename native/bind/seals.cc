// Bindings of sealing, for the connections that Python makes: the rendezvous and the data peers.

#include "core/links/seal.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "bind.h"
#include "core/memory/fault.h"

namespace nb = nanobind;

namespace multiring {
namespace {

// Both directions of one connection of Python's. A message is one record, without a head.
class MessageSeal {
 public:
  explicit MessageSeal(SealPair seals) : seals_(std::move(seals)) {}

  nb::bytes close(const nb::bytes& message) {
    const std::span<const std::byte> part(reinterpret_cast<const std::byte*>(message.c_str()), message.size());
    std::string sealed(message.size() + Seal::kTagBytes, '\0');
    if (!seals_.out->seal({}, {&part, 1}, reinterpret_cast<std::byte*>(sealed.data()))) {
      throw Fault(FaultKind::state, "libcrypto cannot encrypt a message; MULTIRING_SEAL=1 needs it");
    }
    return nb::bytes(sealed.data(), sealed.size());
  }

  nb::object open(const nb::bytes& sealed) {
    if (sealed.size() < Seal::kTagBytes) return nb::none();
    std::string message(sealed.size() - Seal::kTagBytes, '\0');
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(sealed.c_str()), sealed.size());
    if (!seals_.in->open({}, bytes, reinterpret_cast<std::byte*>(message.data()))) return nb::none();
    return nb::bytes(message.data(), message.size());
  }

 private:
  SealPair seals_;
};

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

}  // namespace

void bind_seals(nb::module_& m) {
  m.def(
      "load_crypto", [](const std::string& path) { return CryptoLibrary::load(path).version(); }, nb::arg("path"),
      "Load libcrypto from a path, or the system's if the path is empty, and return its version. The process keeps the "
      "first library.");
  nb::class_<MessageSeal>(m, "MessageSeal")
      .def("close", &MessageSeal::close, nb::arg("message"), "Return the next message, encrypted, with its tag.")
      .def("open", &MessageSeal::open, nb::arg("sealed"),
           "Return the message; None if it is not the one that the other end closed next.");
  nb::class_<KeyExchange>(m, "KeyExchange")
      .def(nb::init<>())
      .def_prop_ro(
          "offer", [](const KeyExchange& self) { return nb::bytes(self.offer().data(), self.offer().size()); },
          "The bytes to send to the other end: the preferred cipher and the public key.")
      .def(
          "seal",
          [](const KeyExchange& self, const nb::bytes& theirs, const nb::bytes& secret, const nb::bytes& transcript,
             bool calls) {
            return MessageSeal(self.seals(text_of(theirs), text_of(secret), text_of(transcript), calls));
          },
          nb::arg("theirs"), nb::arg("secret"), nb::arg("transcript"), nb::arg("calls"),
          "Return the seal of the connection. `transcript` must include both offers; `calls` differs between the ends.");
}

}  // namespace multiring

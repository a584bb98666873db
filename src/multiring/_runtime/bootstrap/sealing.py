"""Encryption of the connections that Python makes: a key exchange in their handshake, and the seal after it.

The native core encrypts and decrypts (native/core/links/seal.h). This module uses no sockets.
"""

from typing import Final

from multiring._native import KeyExchange, MessageSeal, load_crypto
from multiring._runtime.bootstrap.handshake import PROTOCOL, FrameError, Message, Seal, decode, frame, proof
from multiring.errors import StateError

SEAL_BYTES: Final = 16  # the bytes that a seal adds to a message


class KeyOffer:
    """One end of a key exchange. The proofs of the handshake must cover `text` and the other end's text.

    Args:
        library: the path of libcrypto, or an empty text for the system's.

    Raises:
        StateError: libcrypto is missing or too old.
    """

    def __init__(self, library: str = "") -> None:
        load_crypto(library)
        self._exchange = KeyExchange()
        self.text = self._exchange.offer.hex()  # send it to the other end

    def seal(self, theirs: str, secret: bytes, server_nonce: str, client_nonce: str, me: str) -> "SecretSeal":
        """Return the seal of the connection, once the other end has proven that `theirs` is its offer.

        Args:
            theirs: the other end's text.
            secret: the job's secret.
            server_nonce: the server's nonce.
            client_nonce: the client's nonce.
            me: this end, "client" or "server".

        Raises:
            FrameError: `theirs` is no offer.
        """
        offers = (self.text, theirs) if me == "client" else (theirs, self.text)
        transcript = "\n".join((PROTOCOL, server_nonce, client_nonce, *offers)).encode()
        try:
            found = self._exchange.seal(bytes.fromhex(theirs), secret, transcript, me == "client")
        except (ValueError, RuntimeError) as error:
            raise FrameError(f"its key offer is invalid: {error}") from None
        return SecretSeal(found)


class SecretSeal:
    """One end of an encrypted connection, with the functions of `handshake.Seal`.

    Args:
        seal: the native seal. It counts the messages of each direction.
    """

    def __init__(self, seal: MessageSeal) -> None:
        self._seal = seal
        self._is_broken = False

    def close(self, payload: bytes) -> bytes:
        """Return the frame that carries `payload`, encrypted, to the other end."""
        return frame(self._seal.close(payload))

    def frames(self, payload: bytes, _digest: bytes) -> tuple[bytes, ...]:
        """Return the parts of the frame of `payload`; connections cannot share encrypted bytes."""
        return (self.close(payload),)

    def open(self, sealed: bytes) -> Message:
        """Decrypt a frame's payload and return the message.

        Raises:
            FrameError: the payload is not the other end's next frame, or it was modified.
        """
        return decode(self.verified(sealed))

    def verified(self, sealed: bytes) -> bytes:
        """Decrypt a frame's payload and return its bytes.

        Raises:
            FrameError: the payload is not the other end's next frame, or it was modified.
        """
        payload = None if self._is_broken else self._seal.open(sealed)
        if not isinstance(payload, bytes):
            self._is_broken = True  # what follows is not read either
            raise FrameError("a sealed frame is not authentic: the bytes on the connection were changed")
        return payload


def client_words(told: Message) -> str:
    """Return the first word of a client's proof. It covers the client's offer, or its reason for having none."""
    if "fault" in told:
        return f"client fault {told['fault']}"
    return f"client {told['offer']}" if "offer" in told else "client"


def offer_for(told: Message, rank: int, *, seals: bool, library: str) -> KeyOffer | str | None:
    """Return rank 0's key offer for an authenticated rank; None if the job does not seal.

    Args:
        told: the rank's message with its proof.
        rank: the rank's number.
        seals: whether rank 0 seals.
        library: the path of rank 0's libcrypto, or an empty text.

    Returns:
        A text if one of the two ranks does not seal or cannot: why the job fails.
    """
    if "fault" in told:
        return f"rank {rank}: {told['fault']}"
    if seals != ("offer" in told):
        with_it, without = (0, rank) if seals else (rank, 0)
        return (
            f"rank {with_it} has MULTIRING_SEAL=1, but rank {without} does not; set it to the same value on all ranks"
        )
    try:
        return KeyOffer(library) if seals else None
    except StateError as error:
        return f"rank 0: {error}"


def server_answer(
    offer: KeyOffer | None, secret: bytes, told: Message, nonces: tuple[str, str], rank: int
) -> tuple[Message, "Seal | SecretSeal"]:
    """Return a server's answer with its proof to an authenticated client, and the seal of the connection.

    Args:
        offer: the server's key offer, if the connection is encrypted.
        secret: the job's secret.
        told: the client's message with its proof.
        nonces: the server's nonce and the client's.
        rank: the number in the proofs.
    """
    if offer is None:
        seal = Seal(proof(secret, "session", *nonces, rank), "server")
        return {"proof": proof(secret, "server", *nonces, rank)}, seal
    words = f"server {told['offer']} {offer.text}"
    answer = {"proof": proof(secret, words, *nonces, rank), "offer": offer.text}
    return answer, offer.seal(str(told["offer"]), secret, *nonces, "server")

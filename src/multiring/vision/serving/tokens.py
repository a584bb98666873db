"""Bearer tokens: a file with one token a line."""

import hashlib
import hmac
import stat
from pathlib import Path

from multiring.errors import ArgumentError

_LEAST = 16  # characters


class BearerTokens:
    """The tokens that a server accepts. Only their digests are kept."""

    def __init__(self, path: Path) -> None:
        """Read a file with a token on each line. Empty lines and lines that begin with "#" are passed over.

        Raises:
            ArgumentError: the file cannot be read, other users can read it, or it has no token or a short one.
        """
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"tokens {str(path)!r} cannot be read: {error}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ArgumentError(f"other users may read the tokens {str(path)!r}: run chmod 600 {path}")
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ArgumentError(f"{str(path)!r} has no token: want one a line")
        if min(map(len, tokens)) < _LEAST:
            raise ArgumentError(f"a token of {str(path)!r} has fewer than {_LEAST} characters: want longer ones")
        self._digests = [hashlib.sha256(each.encode()).digest() for each in tokens]

    def accepts(self, authorization: str) -> bool:
        """Return whether the value of the header Authorization has one of the tokens."""
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        # All are compared, so the time tells nothing.
        is_known = [hmac.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(is_known)

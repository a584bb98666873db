"""Bearer tokens: a file with one token a line."""

import hashlib
import hmac
from pathlib import Path

from multiring._web.token_files import read_tokens


class BearerTokens:
    """The tokens that a server accepts. Only their digests are kept."""

    def __init__(self, path: Path) -> None:
        """Read a file with a token on each line.

        Raises:
            ArgumentError: as of `read_tokens`.
        """
        self._digests = [hashlib.sha256(each.encode()).digest() for each in read_tokens(path)]

    def accepts(self, authorization: str) -> bool:
        """Return whether the value of the header Authorization has one of the tokens."""
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        # All are compared, so the time tells nothing.
        is_known = [hmac.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == "bearer" and any(is_known)

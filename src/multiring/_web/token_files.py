"""Files of tokens: one token a line."""

import stat
from pathlib import Path

from multiring.errors import ArgumentError

_LEAST = 16  # characters


def read_tokens(path: Path) -> list[str]:
    """Return the tokens of a file, at least one. Empty lines and lines that begin with "#" are passed over.

    Raises:
        ArgumentError: the file cannot be read, other users can read it, or it has no token, a short one, or one with
            other characters than visible ASCII.
    """
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"tokens {str(path)!r} cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ArgumentError(f"other users may read the tokens {str(path)!r}: run chmod 600 {path}")
    tokens = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not tokens:
        raise ArgumentError(f"{str(path)!r} has no token: want one a line, such as from `openssl rand -hex 32`")
    if min(map(len, tokens)) < _LEAST:
        raise ArgumentError(f"a token of {str(path)!r} has fewer than {_LEAST} characters: want longer ones")
    if not all(each.isprintable() for each in tokens):
        raise ArgumentError(f"a token of {str(path)!r} has control characters: want visible ASCII")
    return tokens

"""Retry requests to remote sources, and remove secrets from URLs and error messages."""

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

Answer = TypeVar("Answer")

TRIES = 6
_FIRST_S, _LONGEST_S = 0.1, 5.0
# HTTP statuses of temporary failures: time-outs, too many or too early requests, and servers that are overloaded or
# restarting.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_KINDS = (ConnectionError, TimeoutError, EOFError)
_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"
_HIDING = re.compile(r"pass|secret|token|key|signature|credential|auth|sas|user", re.IGNORECASE)
_LEAST = 4  # the minimum length of a secret in characters, because shorter texts occur everywhere


class ShortAnswerError(OSError):
    """The source sent more or fewer bytes than were requested."""


def is_passing(error: BaseException) -> bool:
    """Return whether an error of a source may be temporary, so that a retry helps."""
    status = next(
        (code for name in ("status", "status_code", "code") if type(code := getattr(error, name, None)) is int), None
    )
    if status is not None and status >= 100:
        return status in _PASSING
    # aiohttp and other libraries have classes of their own for broken connections and for time-outs.
    is_cut = type(error).__module__.partition(".")[0] in {
        "aiohttp",
        "requests",
        "urllib3",
        "botocore",
        "httpx",
    } and any(
        word in type(error).__name__
        for word in ("Connect", "Disconnect", "Payload", "Timeout", "Protocol", "Incomplete")
    )
    return is_cut or isinstance(error, (*_PASSING_KINDS, ShortAnswerError))


def asked_again(
    ask: Callable[[], Answer], until: float, sleep: Callable[[float], None] = time.sleep, tries: int = TRIES
) -> Answer:
    """Return the result of `ask`; retry with growing pauses after temporary errors.

    Args:
        ask: sends a request to a source.
        until: the deadline, in seconds of `time.monotonic`.
        sleep: called with the seconds of a pause.
        tries: the most calls of `ask`.

    Raises:
        Exception: the exception of the last call.
    """
    for tried in range(1, tries + 1):
        try:
            return ask()
        except Exception as error:
            # A random pause keeps the ranks of a job from retrying all at once.
            pause = min(_LONGEST_S, _FIRST_S * 2**tried) * (0.5 + random.random() / 2)  # noqa: S311 -- no secret
            if tried == tries or not is_passing(error) or time.monotonic() + pause >= until:
                raise
            sleep(pause)
    raise AssertionError("internal error: the source was not asked")


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment, for errors and logs."""
    return "::".join(_bare(part) for part in re.split(r"[?#]", url, maxsplit=1)[0].split("::"))


def _bare(url: str) -> str:
    scheme, slashes, rest = url.partition("://")
    if not slashes or not re.fullmatch(_SCHEME, scheme):
        return url
    host, slash, path = rest.partition("/")
    if "@" in host:
        host = host.rpartition("@")[2]
    elif "@" in path and ":" in host and not re.fullmatch(r"[^:]*:\d{0,5}", host) and not host.startswith("["):
        # The password has an unquoted slash, which is not valid in a URL.
        host, slash, path = f"{host}{slash}{path}".rpartition("@")[2].partition("/")
    if ":" in host and not host.startswith("[") and not re.fullmatch(r"[^:]*:\d{0,5}", host):
        return f"{scheme}://***"  # the text is the beginning of a password that contains a ? or a #
    return f"{scheme}://{host}{slash}{path}"


def without_login(path: str) -> str:
    """Return a path without user, password and query, in case it is a mistyped URL."""
    return re.sub(r"[^/\s]*:[^/\s]*@", "***@", re.sub(r"[?#].*=.*", "", path))


def secrets_of(url: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the secrets in a URL and in a file system's options, the longest first."""
    found: list[str] = []
    for part in url.split("::"):
        _, slashes, rest = part.partition("://")
        if slashes and "@" in rest and without_secrets(part) != part:
            user = rest.partition("?")[0].rpartition("@")[0] or rest.rpartition("@")[0]
            found += [user, *user.split(":", 1)]
        _, _, query = part.partition("?")
        found += [query, *(each.partition("=")[2] for each in re.split(r"[&;#]", query))]
    found += _hidden_in(options or {})
    found += [unquote(each) for each in found]
    return sorted({each for each in found if len(each) >= _LEAST}, key=len, reverse=True)


def _hidden_in(options: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _hidden_in(value)
        elif isinstance(value, str | bytes) and _HIDING.search(str(name)):
            found.append(value if isinstance(value, str) else value.decode("utf-8", "replace"))
    return found


def redacted(text: str, secret: list[str]) -> str:
    """Remove secrets from a text, and users, passwords and queries from its URLs.

    Args:
        text: a library's message.
        secret: texts to replace by ***.
    """
    bare = re.sub(rf"{_SCHEME}://[^\s'\"<>)]+", lambda found: without_secrets(found[0]), text)
    for each in secret:
        bare = bare.replace(each, "***")
    return bare

"""A rank's identity: its numbers in its job, and where and with which secret the ranks meet."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from multiring._exchanges import Publication
from multiring._settings import Settings
from multiring.errors import ArgumentError, RendezvousError


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A rank's numbers in its job, and the address and secret of the rendezvous.

    - `secret` may be empty if the address is an abstract socket, because the kernel reports the user at the other end.
      Then rank 0 draws a secret and sends it to the others; see `Rendezvous.secret`.
    - `local_rank` and `local_size` are None if the launcher does not set them.
    - `source` names the launcher.
    - `told` lists the variables that gave these values, for error messages.
    - `listener` is set on rank 0 if multiring chose the address: the socket that is already bound to it.
    - `votes` is the address at which the launcher takes part in votes, if it is not the one of the job's start.
    - `seals`: the job encrypts its connections (MULTIRING_SEAL), with the libcrypto at the path `seal_library`.
    - `is_withdrawn` says, while the ranks meet, whether they will not meet any more, because one of them was lost.
    - `publication` is set on rank 0 if it still tells the address to the other ranks; who joins the job closes it.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    rendezvous: str
    secret: bytes = field(repr=False)
    job: str
    source: str
    told: str = field(default="", compare=False)
    listener: socket.socket | None = field(default=None, repr=False, compare=False)
    publication: Publication | None = field(default=None, repr=False, compare=False)
    votes: str | None = field(default=None, repr=False, compare=False)
    seals: bool = False
    seal_library: str = ""
    is_withdrawn: Callable[[], bool] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number(self.source, "rank", self.rank, self.size)
        if self.local_rank is not None and self.local_size is not None:
            _check_number(self.source, "local rank", self.local_rank, self.local_size)

    def refuse_withdrawn(self) -> None:
        """Raise RendezvousError if the ranks will not meet any more."""
        if self.is_withdrawn is not None and self.is_withdrawn():
            raise RendezvousError("a process was lost while the ranks met: they meet again without it")

    def stop_telling(self) -> None:
        """Close the publication, if there is one. A further call does nothing."""
        if self.publication is not None:
            self.publication.close()


def sealing_as(settings: Settings, identity: Identity) -> Identity:
    """Return the identity with the settings of encryption."""
    return replace(identity, seals=settings.seal, seal_library=settings.seal_library or "")


@contextlib.contextmanager
def naming(variable: str) -> Iterator[None]:
    """Add the variable's name to an ArgumentError that the `with` block raises."""
    try:
        yield
    except ArgumentError as error:
        if type(error) is not ArgumentError:  # callers may handle a subclass of ArgumentError
            raise
        raise ArgumentError(f"{variable}: {error}") from None


def _check_number(source: str, what: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        kind = what.removesuffix("rank").replace(" ", "_").upper()
        where = f" in MULTIRING_{kind}RANK" if source == "multiring" else ""
        raise ArgumentError(f"{source}: {what} {rank} of {size}, want 0 to {size - 1}{where}")


def first_number(foreign: Mapping[str, str], *names: str) -> int | None:
    return next((number(foreign, name) for name in names if name in foreign), None)


def number(foreign: Mapping[str, str], name: str) -> int:
    text = foreign.get(name)
    if text is None:
        raise ArgumentError(f"{name} is not set, although other variables of the same launcher are set")
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentError(f"{name}={text!r}: want an integer >= 0")
    return int(text)

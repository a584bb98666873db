"""What the launcher tells each process when the ranks meet newcomers and form anew."""

import json
from dataclasses import asdict, dataclass, field

from multiring._runtime.failures.launcher_channel import proof_of


@dataclass(frozen=True, kw_only=True, slots=True)
class FormationPlace:
    """A process's place in a formation of the job.

    A job begins with formation 0. Each later one has its own connections, memory and secret, so a process that left
    cannot come back.

    - formation: its number.
    - former: by rank, the process's number in the native core in the formation before; None for a newcomer.
    - job, secret, rendezvous: as in an Identity.
    - told: what the ranks tell newcomers.
    - votes: the address at which the launcher takes part in votes.
    """

    formation: int
    rank: int
    former: tuple[int | None, ...]
    job: str
    secret: str = field(repr=False)
    rendezvous: str
    votes: str
    told: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.former)

    def encode(self) -> bytes:
        """Return the place as a line of text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, line: bytes) -> "FormationPlace":
        """Return the place in a line.

        Raises:
            ValueError: the line is no place.
        """
        found = json.loads(line)
        try:
            return cls(**{**found, "former": tuple(found["former"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{line[:100]!r} is no place: {error}") from None


def intake_proof(secret: bytes, job: str, number: int) -> str:
    """Return the proof that a process was started by the job's launcher.

    Args:
        secret: the secret that the launcher gave the process.
        job: the job's name that it gave the process.
        number: the process's number in the job.
    """
    return proof_of(secret, f"{job}|intake", number)

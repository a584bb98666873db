"""The torch.distributed programs under test, and the comparison of their losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tests.support.program_ranks import losses_of

FIRST, LATER = 1e-6, 1e-4  # largest relative differences: at step 1, and at any of 50 steps
STEPS = 50


@dataclass(frozen=True, slots=True)
class Case:
    """A program, its arguments, and the numbers of ranks on which it runs."""

    what: str
    program: str
    arguments: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (2, 3, 4)
    why: str = ""  # the reason for these numbers of ranks


CASES = {
    "ddp": Case("DDP", "ddp.py"),
    "accelerate": Case("Accelerate", "with_accelerate.py"),
    "lightning": Case("Lightning, DDPStrategy", "with_lightning.py"),
    "trainer": Case("Hugging Face Trainer", "with_trainer.py"),
    "fsdp2": Case("FSDP2", "fsdp2.py"),
    "hsdp": Case("HSDP", "fsdp2.py", ("--replicas", "2"), (4,), "2 replicas of 2 shards"),
    "tensor": Case("DTensor", "tensor_parallel.py", (), (2, 4), "2 hold a block; 4 are 2 such pairs"),
    "gpipe": Case("Pipelining, GPipe", "pipeline.py", ("--schedule", "gpipe")),
    "1f1b": Case("Pipelining, 1F1B", "pipeline.py", ("--schedule", "1f1b")),
    "interleaved": Case("Pipelining, interleaved 1F1B", "pipeline.py", ("--schedule", "interleaved")),
    "context": Case("Context parallel, keys and values gathered", "context_parallel.py"),
}


@cache
def losses(name: str, ranks: int, backend: str, deadline_s: float = 300.0) -> list[float]:
    """Return the loss of each step of a case."""
    case = CASES[name]
    words = ("--steps", str(STEPS), *case.arguments)
    return losses_of(case.program, ranks, *words, backend=backend, deadline_s=deadline_s)


def apart(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the relative differences of the losses, by step."""
    return [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]


def is_close(ours: Sequence[float], theirs: Sequence[float], ranks: int) -> bool:
    """Return whether the losses of two runs are close enough.

    On two ranks they must be equal, because every order of summation gives the same bits.
    """
    if ranks == 2:
        return ours == theirs
    differences = apart(ours, theirs)
    return differences[0] <= FIRST and max(differences) <= LATER

"""Which programs for torch.distributed are run, on how many ranks, and how their losses are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tests.frameworks.program_ranks import losses_of

FIRST, LATER = 1e-6, 1e-4  # relative differences: at the first step, and at any of 50
STEPS = {2: 10, 3: 50, 4: 50}  # by ranks


@dataclass(frozen=True, slots=True)
class Case:
    """A program, how it is called, and on how many ranks beside two."""

    what: str
    program: str
    arguments: tuple[str, ...]
    sizes: tuple[int, ...]


CASES = {
    "ddp": Case("DDP", "ddp.py", (), (2, 3)),
    "accelerate": Case("Accelerate", "with_accelerate.py", (), (2, 3)),
    "lightning": Case("Lightning, DDPStrategy", "with_lightning.py", (), (2, 3)),
    "trainer": Case("Hugging Face Trainer", "with_trainer.py", (), (2, 3)),
    "fsdp2": Case("FSDP2", "fsdp2.py", (), (2, 3)),
    "hsdp": Case("HSDP, 2 replicas of 2 shards", "fsdp2.py", ("--replicas", "2"), (4,)),
    "tensor": Case("DTensor: tensor and sequence parallel, by 4 ranks with FSDP2", "tensor_parallel.py", (), (2, 4)),
    "gpipe": Case("Pipelining, GPipe", "pipeline.py", ("--schedule", "gpipe"), (2, 3)),
    "1f1b": Case("Pipelining, 1F1B", "pipeline.py", ("--schedule", "1f1b"), (2, 3)),
    "interleaved": Case("Pipelining, interleaved 1F1B", "pipeline.py", ("--schedule", "interleaved"), (2, 4)),
    "context": Case("Context parallel, keys and values gathered", "context_parallel.py", (), (2, 4)),
}


@cache
def losses(name: str, ranks: int, backend: str) -> list[float]:
    """Return the losses of a case's steps."""
    case = CASES[name]
    return losses_of(case.program, ranks, "--steps", str(STEPS[ranks]), *case.arguments, backend=backend)


def apart(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the relative differences of losses, by step."""
    return [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]

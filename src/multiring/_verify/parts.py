"""The parts of `multiring verify gpu`: each is one job of some ranks, with checks and figures."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPart:
    """One job.

    - name: names the part in commands and files; the worker has a function of this name.
    - title: what the part shows.
    - ranks: takes the number of GPUs of this host; returns the number of ranks, or None if there are too few GPUs.
    - needs: what is missing if `ranks` returns None.
    - limit_s: the job is ended after this many seconds, and the part has failed.
    - loses_a_rank: the job ends with an error, because one rank is killed.
    - worker: the file of the worker.
    - settings: variables of the environment that the ranks get.
    """

    name: str
    title: str
    ranks: Callable[[int], int | None]
    needs: str = ""
    limit_s: float = 120.0
    loses_a_rank: bool = False
    worker: str = "gpu.py"
    settings: dict[str, str] = field(default_factory=dict)


def _two(_gpus: int) -> int:
    return 2


def _two_gpus(gpus: int) -> int | None:
    return min(gpus, 4) if gpus >= 2 else None


PARTS = (
    VerifyPart(name="versions", title="libraries, versions and devices", ranks=lambda _: 1, limit_s=60),
    VerifyPart(
        name="behaviours", title="how CUDA, torch and NCCL behave, beside an H100", ranks=lambda _: 1, limit_s=300
    ),
    VerifyPart(name="collectives", title="collectives of CUDA tensors beside sums on the host", ranks=_two),
    VerifyPart(name="backend", title='torch.distributed with the backend "multiring"', ranks=_two),
    VerifyPart(name="training", title="training beside one process", ranks=_two, limit_s=180),
    # Inside a host nothing is rounded, except over sockets.
    VerifyPart(
        name="wire",
        title="training with wire types, over sockets",
        ranks=_two,
        limit_s=180,
        settings={"MULTIRING_ENGINE": "tcp"},
    ),
    VerifyPart(name="caller", title="what a call costs the caller, and rates", ranks=_two),
    VerifyPart(name="refusals", title="wrong and impossible calls", ranks=_two),
    VerifyPart(name="death", title="a rank that is killed", ranks=_two, limit_s=60, loses_a_rank=True),
    VerifyPart(name="nccl", title="the engine nccl, one rank on a GPU", ranks=lambda gpus: min(gpus, 4)),
    VerifyPart(name="jax", title="collectives in JAX programs", ranks=_two, limit_s=180, worker="jax_programs.py"),
    VerifyPart(
        name="gpus",
        title="collectives with a GPU for each rank",
        ranks=_two_gpus,
        needs="two GPUs",
    ),
)

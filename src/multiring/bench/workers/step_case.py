"""What a worker of `multiring bench step` is asked, and how its ranks meet without any library's help."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """How many parameters a network has, and samples a rank's batch where nobody says otherwise."""

    parameters: int
    samples: int


NETWORKS: Mapping[str, Size] = {
    "resnet50": Size(25_557_032, 4),
    "vgg16": Size(138_357_544, 4),
    "embedding": Size(25_633_025, 512),
    "transformer": Size(97_737_216, 2),
}
DTYPES = ("bfloat16", "float32")
OURS, DDP, INDEPENDENT = "multiring", "ddp", "independent"
# Other programs of torch: DistributedDataParallel over multiring as a backend, by itself or with its communication
# hook, and fully_shard over Gloo, over multiring, and with what is sent and received in multiring's arena.
DDP_OURS, DDP_OURS_HOOK = "ddp-multiring", "ddp-multiring-hook"
FSDP, FSDP_OURS, FSDP_OURS_ARENA = "fsdp", "fsdp-multiring", "fsdp-multiring-arena"
ANSWER = "rank"  # what a rank tells the bench
_POLL_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """What to time. All ranks of a job read the same one.

    library: OURS, DDP, INDEPENDENT or one of the others above.
    batch: samples a rank; image_size: pixels of an image's side.
    dtype: of the arithmetic (autocast); parameters and gradients are float32.
    steps, warmup: how many steps are timed, and how many come before, behind those that verify.
    wire: how OURS codes gradients between hosts; "": not at all.
    pace: the file with a measured `Pace`: compute is emulated, and takes as long as it says; "": compute is real.
    """

    library: str
    network: str
    batch: int
    image_size: int
    dtype: str
    threads: int
    steps: int
    warmup: int
    out_dir: str
    wire: str = ""
    pace: str = ""

    def write(self, path: Path) -> None:
        """Write it for `read_case`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_case() -> StepCase:
    """Return the case in the file that this process's first argument names."""
    return StepCase(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long a network's compute takes on a core of its own, in seconds.

    `backward` has each parameter's name, in the order in which their gradients come, and the time since the one before.
    """

    forward_s: float
    backward: tuple[tuple[str, float], ...]
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.forward_s + sum(seconds for _, seconds in self.backward) + self.optimizer_s

    @classmethod
    def read(cls, path: Path) -> "Pace":
        """Return what `asdict` made of one, from a file of JSON."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        backward = tuple((str(name), float(seconds)) for name, seconds in fields["backward"])
        return cls(forward_s=fields["forward_s"], backward=backward, optimizer_s=fields["optimizer_s"])


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks of a job, who tell each other things through files in `folder`."""

    folder: Path
    rank: int
    ranks: int

    def tell(self, what: str, value: Any) -> None:
        """Give the others `value`, which JSON can hold, under the name `what`; each name once."""
        path = self._path(what, self.rank)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(value), encoding="utf-8")
        new.replace(path)

    def is_told(self, what: str) -> bool:
        """Return whether every rank has told `what`."""
        return all(self._path(what, rank).exists() for rank in range(self.ranks))

    def hear(self, what: str) -> list[Any]:
        """Return what every rank told, by rank; waits for those who have not yet. The job's deadline ends it."""
        while not self.is_told(what):
            time.sleep(_POLL_S)
        return [json.loads(self._path(what, rank).read_text(encoding="utf-8")) for rank in range(self.ranks)]

    def _path(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}-{rank}.json"

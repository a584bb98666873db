"""The case of a worker of `multiring bench step`, and a rendezvous of its ranks that uses no library."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """The number of a network's parameters, and the default number of samples in a rank's batch."""

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
# Other programs of torch: DistributedDataParallel over multiring as a backend, with or without its communication hook;
# and fully_shard over Gloo, over multiring, and over multiring with messages in its arena.
DDP_OURS, DDP_OURS_HOOK = "ddp-multiring", "ddp-multiring-hook"
FSDP, FSDP_OURS, FSDP_OURS_ARENA = "fsdp", "fsdp-multiring", "fsdp-multiring-arena"
# On GPUs: DistributedDataParallel over NCCL, and one process that has a GPU for itself.
DDP_NCCL, ALONE = "ddp-nccl", "alone"
DEVICES = ("cpu", "cuda")
ANSWER = "rank"  # the name of a rank's answer file
_POLL_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """One case to time. All ranks of a job read the same case.

    library: OURS, DDP, INDEPENDENT or another of the names above.
    batch: samples per rank; image_size: pixels along an image's side.
    dtype: the type of the arithmetic (autocast); parameters and gradients are float32.
    steps, warmup: the number of timed steps, and the number of steps before them. The verifying steps come first.
    wire: the wire type of OURS for gradients between hosts; "": exact.
    pace: the file with a measured `Pace`, by which compute is emulated; "": compute is real.
    device: the type of the device that has the model.
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
    device: str = "cpu"

    def write(self, path: Path) -> None:
        """Write the case for `read_case`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_case() -> StepCase:
    """Return the case in the file named by the first argument."""
    return StepCase(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The seconds of a network's compute on a core of its own.

    `backward` has each parameter's name, in the order in which gradients become ready, and the time since the previous
    gradient.
    """

    forward_s: float
    backward: tuple[tuple[str, float], ...]
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The seconds of a whole step."""
        return self.forward_s + sum(seconds for _, seconds in self.backward) + self.optimizer_s

    @classmethod
    def read(cls, path: Path) -> "Pace":
        """Read a pace from a file of JSON that `asdict` made."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        backward = tuple((str(name), float(seconds)) for name, seconds in fields["backward"])
        return cls(forward_s=fields["forward_s"], backward=backward, optimizer_s=fields["optimizer_s"])


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A rendezvous of a job's ranks, which exchange values through files in `folder`."""

    folder: Path
    rank: int
    ranks: int

    def tell(self, what: str, value: Any) -> None:
        """Publish `value`, which JSON can hold, under the name `what`.

        Publish each name only once.
        """
        path = self._path(what, self.rank)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(value), encoding="utf-8")
        new.replace(path)

    def is_told(self, what: str) -> bool:
        """Return whether every rank has published `what`."""
        return all(self._path(what, rank).exists() for rank in range(self.ranks))

    def hear(self, what: str) -> list[Any]:
        """Wait until every rank has published `what`; return the values by rank.

        The job's deadline limits the wait.
        """
        while not self.is_told(what):
            time.sleep(_POLL_S)
        return [json.loads(self._path(what, rank).read_text(encoding="utf-8")) for rank in range(self.ranks)]

    def _path(self, what: str, rank: int) -> Path:
        return self.folder / f"{what}-{rank}.json"

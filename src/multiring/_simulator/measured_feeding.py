"""What the workers of a loader took for their samples: measured in a script's profile, or by `multiring data bench`.

docs/profile.md describes the fields, and docs/simulate.md the file of `multiring data bench --save`.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from multiring._strict_json import FileFormat, Path, WrongFieldError, require_fields
from multiring.planner.parallelism import Feeding

_FORMAT = FileFormat(
    field="multiring_input",
    version=1,
    wanted="want a file of `multiring data bench --save`",
    anew="measure anew with this version's `multiring data bench`",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFeeding:
    """What a rank's workers took.

    The fields are those of `Feeding`: `workers` made the samples, each in `worker_s` seconds for a sample, of which
    `cpu_s` were processor time. A profile has `batch_s` as a part of the wait for input, and as 0 here. `sample_bytes`
    are the bytes of a sample in the source; 0: unknown.
    """

    workers: int
    worker_s: float
    cpu_s: float
    compute_cores: float = 0.0
    batch_s: float = 0.0
    sample_bytes: float = 0.0

    def feeding(
        self,
        *,
        workers: int | None = None,
        cores: float | None = None,
        source_bytes_per_s: float | None = None,
        sample_bytes: float | None = None,
    ) -> Feeding:
        """Return how these workers feed a rank.

        Args:
            workers: the workers of a rank; by default as many as were measured.
            cores: the cores of a host; None: each worker has one.
            source_bytes_per_s: what the source delivers to all hosts together; None: it bounds nothing.
            sample_bytes: the bytes of a sample in the source; by default the measured ones.

        Raises:
            ArgumentError: a number is not positive, or the bytes of a sample are needed and unknown.
        """
        return Feeding(
            worker_s=self.worker_s,
            cpu_s=self.cpu_s,
            workers=self.workers if workers is None else workers,
            cores=cores,
            compute_cores=self.compute_cores,
            batch_s=self.batch_s,
            source_bytes_per_s=source_bytes_per_s,
            sample_bytes=sample_bytes if sample_bytes is not None else self.sample_bytes or None,
        )

    def as_text(self) -> str:
        """Return the text of a file."""
        return f"{json.dumps({**_FORMAT.head, **asdict(self)}, indent=1)}\n"


def measured_feeding_of(text: str) -> MeasuredFeeding:
    """Return what is in the text of a file of `multiring data bench --save`.

    Raises:
        ArgumentError: the text is no such file. The error names the line and the field.
    """
    return _FORMAT.read(text, lambda table: feeding_at(table, ()))


def feeding_at(value: Any, path: Path) -> MeasuredFeeding:
    """Return what the object `value` of a JSON file has.

    Raises:
        WrongFieldError: a field is missing, unknown or wrong.
    """
    require_fields(value, MeasuredFeeding, path)
    if not value["worker_s"]:
        raise WrongFieldError((*path, "worker_s"), "0: want a number above 0")
    return MeasuredFeeding(**value)


def is_file_of_feeding(data: bytes) -> bool:
    """Return whether `data` is the content of a file of `multiring data bench --save`."""
    return f'"{_FORMAT.field}"'.encode() in data[:100]

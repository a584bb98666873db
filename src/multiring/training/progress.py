"""What a training has reached, and its clock."""

import math
import time
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class TrainingProgress:
    """The progress and the latest results of a run.

    Attributes:
        step: the number of steps so far.
        best: the highest first score so far, or the negated lowest loss.
        trained_s: the seconds of training, without evaluation and checkpoints.
        waited_s: the part of `trained_s` that was spent waiting for data.
        wall_s: the seconds with evaluation and checkpoints.
        samples: the samples of all ranks in these steps. As the times, they are of all processes of this run.
        scores: the scores by evaluation set and name, in percent.
        losses: the mean loss of a sample by evaluation set.
        counts: the counts by evaluation set, from which scores are computed.
    """

    step: int = 0
    best: float = -math.inf
    trained_s: float = 0.0
    waited_s: float = 0.0
    wall_s: float = 0.0
    samples: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


class TrainingClock:
    """Counts the seconds of a training into its progress, without the breaks between its processes.

    Args:
        progress: the progress, whose times may be those of earlier processes when `start` is called.
    """

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self.start()

    def start(self) -> None:
        """Begin with the progress's times as they are."""
        self._counted_to = time.monotonic()
        self._began = self._counted_to - self._progress.wall_s

    def count(self) -> None:
        """Count the time since the last call, or since `go_on`, as training.

        The wait for a step's loss is counted with the next step: a GPU computes while the host waits there.
        """
        now = time.monotonic()
        self._progress.trained_s += now - self._counted_to
        self._counted_to = now

    def go_on(self) -> None:
        """Leave out the time since the last call of `count`."""
        self._counted_to = time.monotonic()

    def wall_s(self) -> float:
        """Return the seconds with evaluation and checkpoints."""
        self._progress.wall_s = time.monotonic() - self._began
        return self._progress.wall_s

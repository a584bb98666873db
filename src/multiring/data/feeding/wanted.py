"""The samples that a batch or a piece of it needs, and reading them in turn."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from multiring.data.dataset import Samples
from multiring.data.permutation import Numbers

_TOGETHER = 32  # samples that are begun at once: enough to make their one call cheap, few enough to hold their files


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedSamples:
    """The samples to read for a batch, in the batch's order."""

    epoch: int
    numbers: Numbers
    places: Numbers | None = None  # positions in the epoch; only if an epoch may have a sample twice
    begin: int = 0  # position in the epoch at which the step begins

    def draw(self, index: int) -> int:
        """Return the number that distinguishes repeated uses of a sample in an epoch."""
        return 0 if self.places is None else int(self.places[index])

    def piece(self, begin: int, end: int) -> "WantedSamples":
        """Return only the samples from `begin` to `end`."""
        places = None if self.places is None else self.places[begin:end]
        return replace(self, numbers=self.numbers[begin:end], places=places)


class BegunSamples:
    """Samples in the order of a piece of a batch, some of them begun together where the data set can do so."""

    def __init__(self, samples: Samples, rows: Mapping[str, NDArray[Any]], first: int, wanted: WantedSamples) -> None:
        self._samples, self._rows, self._first, self._wanted = samples, rows, first, wanted
        self._begin = getattr(samples, "begin_samples", None)
        self._finishes: deque[Callable[[], Mapping[str, Any]]] = deque()

    def sample(self, index: int) -> Mapping[str, Any]:
        """Return a sample; call it for each index in turn, until there is none left.

        Raises:
            DataError, OSError: the sample cannot be read.
        """
        if not self._finishes and self._begin is not None:
            numbers = self._wanted.numbers[index : index + _TOGETHER].tolist()
            draws = [self._wanted.draw(index + each) for each in range(len(numbers))]
            begin = self._first + index
            rows = {name: array[begin : begin + len(numbers)] for name, array in self._rows.items()}
            found = self._begin(numbers, self._wanted.epoch, draws, rows)
            if found is None:
                self._begin = None
            else:
                self._finishes.extend(found)
        if self._finishes:
            return self._finishes.popleft()()
        return self._samples.sample(int(self._wanted.numbers[index]), self._wanted.epoch, self._wanted.draw(index))

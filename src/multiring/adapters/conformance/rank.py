"""A rank of the suite: the adapter, and short helpers for checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance.adapter import Adapter, Array, NonconformanceError, Trainer, kind_of


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank that runs the checks."""

    adapter: Adapter
    rank: int
    size: int

    def reduced(self, array: Array, op: str = "sum", **keywords: Any) -> Array:
        """Convert `array` to the framework's type, combine it over the ranks, and return a NumPy array."""
        made = self.adapter.make(array)
        return self.adapter.back(self.adapter.all_reduce(made, op, **{"process_set": global_process_set, **keywords}))

    def trainer(
        self, parameters: dict[str, Array], rate: float, process_set: ProcessSet = global_process_set
    ) -> Trainer:
        """Return the adapter's trainer of these parameters."""
        return self.adapter.trainer(parameters, rate, process_set)

    def raises(self, kind: type[BaseException], call: Callable[[], object], what: str) -> BaseException:
        """Return the error that `call` raises, as multiring's error; require that it is a `kind`."""
        try:
            call()
        except Exception as error:
            found = kind_of(error)
            if isinstance(found, kind):
                return found
            raise NonconformanceError(f"{what}: {type(found).__name__}: {found}; want {kind.__name__}") from error
        raise NonconformanceError(f"{what}: nothing was raised; want {kind.__name__}")

    def goes_on(self) -> None:
        """Require that a sum over the ranks still works."""
        found = self.reduced(np.full(3, self.rank + 1, np.float32))
        total = self.size * (self.size + 1) // 2
        if found.tolist() != [total] * 3:
            raise NonconformanceError(f"after the check, a sum is {found.tolist()}; want {[total] * 3}")

"""Which logs of a step are results of metrics: those that are the very objects that `result` of a metric returned.

Equal numbers do not tell it: a log of the user's own may happen to be as large as a metric.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Results:
    """What metrics' `result` returns while a step runs or is traced."""

    def __init__(self) -> None:
        self._returned: list[tuple[Any, str]] = []  # the objects live as long as their identities are asked for

    @contextmanager
    def noted(self, metrics: Iterable[Any]) -> Iterator[None]:
        """Note what `result` of these metrics returns in the block."""
        known = [(metric, metric.__dict__.get("result"), metric.result) for metric in metrics]
        for metric, _, plain in known:
            # Not by setattr: Keras looks at what a metric is given.
            metric.__dict__["result"] = functools.partial(self._result, metric.name, plain)
        try:
            yield
        finally:
            for metric, before, _ in known:
                metric.__dict__.pop("result")
                if before is not None:
                    metric.__dict__["result"] = before

    def names_of(self, logs: Any) -> dict[str, str]:
        """Return by the name of a log the name of the metric whose result it is; then forget what was noted."""
        names = {id(value): name for value, name in self._returned}
        found = {log: names[id(value)] for log, value in logs.items() if id(value) in names} if _is_named(logs) else {}
        self._returned.clear()
        return found

    def _result(self, name: str, plain: Any) -> Any:
        found = plain()
        self._returned += [(value, key) for key, value in found.items()] if _is_named(found) else [(found, name)]
        return found


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)

"""Find which logs of a step are results of metrics.

A log is a metric's result if it is the object that the metric's `result` returned. Equal numbers prove nothing: a log
of the user's own may happen to be as large as a metric.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Results:
    """What metrics' `result` returns while a step runs or is traced."""

    def __init__(self) -> None:
        self._returned: list[tuple[Any, str]] = []  # kept, so that no other object gets their identity

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
        """Return by the name of a log the name of the metric whose result it is."""
        names = {id(value): name for value, name in self._returned}
        return {log: names[id(value)] for log, value in logs.items() if id(value) in names} if _is_named(logs) else {}

    def _result(self, name: str, plain: Any) -> Any:
        found = plain()
        self._returned += [(value, key) for key, value in found.items()] if _is_named(found) else [(found, name)]
        return found


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)

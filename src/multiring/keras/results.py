"""Find the logs of a step that are results of metrics.

A log is a metric's result if it is the object that the metric's `result` returned. Equal numbers prove nothing: a
custom log may have the same value as a metric by chance.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Results:
    """Records the objects that metrics' `result` returns while a step runs or is traced."""

    def __init__(self) -> None:
        self._returned: list[tuple[Any, str]] = []  # keeps the objects alive, so no other object gets their identity

    @contextmanager
    def noted(self, metrics: Iterable[Any]) -> Iterator[None]:
        """Record the objects that `result` of these metrics returns inside the block."""
        known = [(metric, metric.__dict__.get("result"), metric.result) for metric in metrics]
        for metric, _, plain in known:
            # Do not use setattr, because Keras tracks the attributes that are set on a metric.
            metric.__dict__["result"] = functools.partial(self._result, metric.name, plain)
        try:
            yield
        finally:
            for metric, before, _ in known:
                metric.__dict__.pop("result")
                if before is not None:
                    metric.__dict__["result"] = before

    def names_of(self, logs: Any) -> dict[str, str]:
        """Return, for each log that is a metric's result, the name of the log and the name of the result."""
        names = {id(value): name for value, name in self._returned}
        return {log: names[id(value)] for log, value in logs.items() if id(value) in names} if _is_named(logs) else {}

    def _result(self, name: str, plain: Any) -> Any:
        found = plain()
        self._returned += [(value, key) for key, value in found.items()] if _is_named(found) else [(found, name)]
        return found


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)

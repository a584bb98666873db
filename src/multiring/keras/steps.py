"""Steps of `fit` and `evaluate` on this rank's part of a batch.

The batch carries the sample counts of the part beside the user's data (`multiring.keras.shards`). The counts are
removed before the model's own `train_step` or `test_step` is called. The step then gets the same structure as in one
process.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import keras

from multiring._frontend.keras_steps import BatchPart, entered
from multiring._frontend.lifecycle import rank, size
from multiring.keras.results import Results
from multiring.keras.shards import unwrapped

OWN_ROWS = "multiring_rows"  # in the logs of a step; the wrapper of the whole function removes it


def install(model: Any, adopt: Callable[[Any], None]) -> "ModelSteps":
    """Make the steps of `model` remove the sample counts from their data.

    Args:
        model: a Keras model.
        adopt: see `multiring._frontend.keras_steps.BatchPart`.
    """
    return ModelSteps(model, adopt)


class ModelSteps:
    """The steps of a model.

    rows: this rank's number of samples in the last step, by kind; in `evaluate`, 1 for this rank's own batch and 0 for
    another rank's batch.
    kind: the kind of the last step, "train" or "test".
    results: by kind, the logs that are results of metrics: for each log's name, the name of the result.
    runs_user_code: whether the model's own step is being traced or run.
    """

    def __init__(self, model: Any, adopt: Callable[[Any], None]) -> None:
        self._model = model
        self._adopt = adopt
        self._is_own = overrides(model, "train_step")
        self.rows: dict[str, Any] = {}
        self.results: dict[str, dict[str, str]] = {}
        self.kind = "train"
        self.runs_user_code = False
        self._place = (rank(), size())
        for kind in ("train", "test"):
            step = getattr(model, f"{kind}_step")
            setattr(model, f"{kind}_step", functools.wraps(step)(functools.partial(self._step, kind, step)))
            make = getattr(model, f"make_{kind}_function")
            setattr(model, f"make_{kind}_function", functools.wraps(make)(functools.partial(self._make, kind, make)))
            setattr(model, f"{kind}_function", None)  # a function traced earlier would not handle the counts
        build = model._symbolic_build  # noqa: SLF001 -- Keras has no other name for it
        model._symbolic_build = functools.partial(_built, build)  # noqa: SLF001

    def follow_job(self) -> None:
        """Make Keras trace the steps again if the rank or the number of ranks has changed.

        A trace contains both numbers.
        """
        if self._place != (place := (rank(), size())):
            self._place = place
            for kind in ("train", "test", "predict"):
                setattr(self._model, f"{kind}_function", None)

    def _step(self, kind: str, plain: Callable[..., Any], *arguments: Any) -> Any:
        part, data = unwrapped(arguments[-1])
        if part is None:  # train_on_batch and similar methods get each rank's own batch
            return plain(*arguments)
        rows, batch_rows = part[0], part[1]
        before = None if keras.backend.backend() == "jax" else self._metric_values(rows)
        self.runs_user_code = True
        returned = Results()
        try:
            with (
                entered(self._of(rows, batch_rows)) if kind == "train" else nullcontext(),
                returned.noted(self._model.metrics),
            ):
                found = plain(*arguments[:-1], data)
        finally:
            self.runs_user_code = False
        self.results[kind] = returned.names_of(found[0] if keras.backend.backend() == "jax" else found)
        if keras.backend.backend() == "jax":
            logs, state = found
            kept = [_chosen(rows, new, old) for new, old in zip(state[-1], arguments[0][-1], strict=True)]
            return self._marked(logs, rows), (*state[:-1], kept)
        if before is not None:
            for variable in self._model.metrics_variables:
                old = before.get(id(variable))
                now = keras.ops.copy(variable.value)
                variable.assign(_chosen(rows, now, keras.ops.zeros_like(now) if old is None else old))
        return self._marked(found, rows)

    def _of(self, rows: Any, batch_rows: Any) -> BatchPart:
        def weighted(value: Any) -> Any:
            if isinstance(rows, int):
                share: Any = rows * size() / batch_rows
                return value if share == 1.0 else value * share
            share = keras.ops.cast(rows * size(), "float32") / keras.ops.cast(batch_rows, "float32")
            if hasattr(value, "dense_shape"):  # TensorFlow's IndexedSlices
                values = value.values * keras.ops.cast(share, value.dtype)
                return type(value)(values, value.indices, value.dense_shape)
            return value * keras.ops.cast(share, value.dtype)

        return BatchPart(
            rows=rows,
            batch_rows=batch_rows,
            # Keras' own step passes the loss to the optimizer, which weights it. A custom step may not do so.
            scales_loss=not self._is_own,
            weighted=weighted,
            adopt=self._adopt,
        )

    def _metric_values(self, rows: Any) -> dict[int, Any] | None:
        """Return the metrics' values before a step if its samples may not count; None if all samples count."""
        if isinstance(rows, int) and rows:
            return None
        return {id(each): keras.ops.copy(each.value) for each in self._model.metrics_variables}

    def _marked(self, logs: Any, rows: Any) -> Any:
        return {**logs, OWN_ROWS: rows} if isinstance(logs, dict) else logs

    def _make(self, kind: str, plain: Callable[..., Any], force: bool = False) -> Any:
        if getattr(self._model, f"{kind}_function") is not None and not force:
            return getattr(self._model, f"{kind}_function")
        plain(force)
        inner = getattr(self._model, f"{kind}_function")

        @functools.wraps(inner)
        def function(*arguments: Any) -> Any:
            self.kind = kind
            found = inner(*arguments)
            logs = found[0] if keras.backend.backend() == "jax" else found
            if isinstance(logs, dict) and OWN_ROWS in logs:
                logs = dict(logs)
                self.rows[kind] = logs.pop(OWN_ROWS)
                return (logs, *found[1:]) if keras.backend.backend() == "jax" else logs
            return found

        setattr(self._model, f"{kind}_function", function)
        return function


def overrides(model: Any, name: str) -> bool:
    """Return whether a model overrides a method of keras.Model or of Keras' other classes."""
    found = next(each for each in type(model).__mro__ if name in vars(each))
    return not found.__module__.startswith("keras.")


def _chosen(rows: Any, new: Any, old: Any) -> Any:
    """Return a metric's new value, or the old value if this rank had no samples of the batch."""
    if isinstance(rows, int):
        return new if rows else old
    return keras.ops.where(rows > 0, new, old)


def _built(plain: Callable[..., Any], iterator: Any = None, data_batch: Any = None) -> Any:
    """Build a model from batches, after removing their sample counts."""
    batches = None if iterator is None else _WithoutParts(iterator)
    return plain(iterator=batches, data_batch=data_batch)


class _WithoutParts:
    """A wrapper of Keras' iterator over an epoch that removes the sample counts from the batches."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        older = not hasattr(self._iterator, "__iter__")
        for *steps, found in self._iterator.enumerate_epoch() if older else self._iterator:
            batch = found[0] if isinstance(found, list | tuple) else next(found)
            yield (*steps, [unwrapped(batch)[1]])

    def enumerate_epoch(self) -> Iterator[tuple[Any, ...]]:
        """Return an iterator; older releases of Keras use this name."""
        return iter(self)

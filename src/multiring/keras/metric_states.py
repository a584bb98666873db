"""Compute metrics over all ranks' samples: the ranks' metric states are summed.

Keras' metrics store sums and counts, and compute the result from them. The sums over the ranks therefore give the
result of one process that has seen all samples. This also holds for custom metrics that change their variables with
`assign_add`. If a metric assigns its variables instead, the ranks' results are averaged, and a warning says so once.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.metrics import reduction_metrics

from multiring._frontend import array_collectives
from multiring._frontend.keras_steps import current_step
from multiring._frontend.lifecycle import size
from multiring._frontend.object_collectives import allgather_object
from multiring._frontend.reduce_ops import Sum
from multiring.errors import MismatchError
from multiring.keras.loss_reductions import tell_once
from multiring.keras.replicas import mean_states
from multiring.keras.steps import ModelSteps
from multiring.keras.values import settled


def install() -> None:
    """Patch Keras so that metrics of one number per batch weight it by the rank's share.

    A custom step may pass a metric one number per batch. If the ranks share a batch, each rank's number is weighted by
    its number of samples.
    """
    plain = reduction_metrics.reduce_to_samplewise_values
    if not hasattr(plain, "multiring"):
        found = functools.wraps(plain)(functools.partial(_samplewise, plain))
        found.multiring = True  # type: ignore[attr-defined]
        reduction_metrics.reduce_to_samplewise_values = found


def _samplewise(plain: Callable[..., Any], values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    step = current_step()
    if (
        step is not None
        and sample_weight is None
        and reduce_fn is not keras.ops.sum
        and not len(getattr(values, "shape", ()))
    ):
        rows = keras.ops.cast(step.rows, "float32")
        sample_weight = rows / keras.ops.cast(step.batch_rows, "float32")
    return plain(values, sample_weight, reduce_fn, dtype)


class MetricStates:
    """Combines the metrics of a model over the ranks.

    Args:
        model: a Keras model.
        steps: the model's steps.
    """

    def __init__(self, model: Any, steps: ModelSteps) -> None:
        self._model = model
        self._steps = steps
        self._plain = model._get_metrics_result_or_logs  # noqa: SLF001 -- Keras has no other name for it
        self._watched: dict[int, Any] = {}
        self._assigned: set[int] = set()
        self._peeks = False
        model._get_metrics_result_or_logs = self.results  # noqa: SLF001

    def watch(self) -> None:
        """Start to record which custom metrics assign values to their variables."""
        for metric in self._model.metrics:
            if not type(metric).__module__.startswith("keras."):
                for variable in metric.variables:
                    if id(variable) not in self._watched:
                        self._watched[id(variable)] = variable
                        self._watch(variable)

    def results(self, logs: Any) -> Any:
        """Return the logs of an epoch or an evaluation, combined over all ranks.

        Every rank calls it.
        """
        if not isinstance(logs, Mapping):
            return self._plain(logs)
        if self._steps.kind == "train" and not self._peeks:
            self._average_states()
        own = _numbers(logs)
        names = self._names_of(own)
        self._combine()
        whole = self._whole()
        results = self._model.get_metrics_result()
        if set(logs) == set(results):
            found = dict(self._plain(logs))
            return {**found, **{name: whole[name] for name in self._averaged_names() if name in found}}
        arrays = {name: value for name, value in results.items() if name in logs and name not in whole}
        return {**logs, **self._last(own), **{name: whole[metric] for name, metric in names.items()}, **arrays}

    def peeked(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logs of a batch, combined over all ranks.

        This rank's metrics do not change.
        """
        settled(self._model)
        self._peeks = True
        try:
            with self._kept():
                found = self.results(logs)
        finally:
            self._peeks = False
        return {name: found[name] for name in logs}

    @contextmanager
    def _kept(self) -> Iterator[None]:
        variables = list(self._model.metrics_variables)
        values = [np.array(keras.ops.convert_to_numpy(each.value)) for each in variables]
        yield
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _average_states(self) -> None:
        """Average layers' states, such as moving averages, over the ranks before an evaluation uses them."""
        if size() > 1 and (names := mean_states(self._model)):
            tell_once(
                f"{', '.join(names)} changed without a gradient, on each rank by its own samples: at the end of each "
                "epoch, such weights are set to their mean over the ranks"
            )

    def _names_of(self, own: Mapping[str, float]) -> dict[str, str]:
        """Return the logs that are results of metrics: for each log's name, the name of the metric's result.

        Rank 0 decides, because it has samples in every batch. A log is a metric's result if it is the object that the
        metric's `result` returned. A plain number counts as well if it has the metric's name and value.
        """
        results = _numbers(self._model.get_metrics_result())
        put = self._steps.results.get(self._steps.kind, {})
        found: dict[str, str] = {}
        for name, value in own.items():
            if put.get(name) in results:
                found[name] = put[name]
            elif name in results and np.isclose(results[name], value, rtol=1e-6, atol=0.0, equal_nan=True):
                found[name] = name
        everybodys: list[dict[str, str]] = allgather_object(found, name="keras.metrics")
        return everybodys[0]

    def _combine(self) -> None:
        variables = list(self._model.metrics_variables)
        values = [np.array(keras.ops.convert_to_numpy(each.value)) for each in variables]
        shapes = [value.shape for value in values]
        everybodys = allgather_object(shapes, name="keras.metrics")
        if any(each != shapes for each in everybodys):
            raise MismatchError(f"the ranks' metrics have variables of different shapes, by rank {everybodys}")
        if not values:
            return
        flat = np.concatenate([value.reshape(-1).astype(np.float64) for value in values])
        sums = array_collectives.allreduce(flat, Sum, name="keras.metrics.sums")
        start = 0
        for variable, value in zip(variables, values, strict=True):
            whole = sums[start : start + value.size].reshape(value.shape)
            start += value.size
            if id(variable) in self._assigned or getattr(variable, "aggregation", "sum") == "only_first_replica":
                continue
            if getattr(variable, "aggregation", "sum") == "mean":
                whole = whole / len(everybodys)
            variable.assign(whole.astype(value.dtype))

    def _averaged_names(self) -> set[str]:
        """Return the names of results of metrics that assign their variables; sums of them would be wrong."""
        found: set[str] = set()
        for metric in self._model.metrics:
            if any(id(each) in self._assigned for each in metric.variables):
                result = metric.result()
                found |= set(result) if isinstance(result, dict) else {metric.name}
        return found

    def _whole(self) -> dict[str, float]:
        whole = _numbers(self._model.get_metrics_result())
        if averaged := sorted(self._averaged_names() & set(whole)):
            tell_once(
                f"metrics {averaged} assign their variables rather than add to them, so their results are averaged "
                "over the ranks: want assign_add of sums and counts, and a result computed from these"
            )
            everybodys = allgather_object([whole[name] for name in averaged], name="keras.metrics")
            whole |= dict(zip(averaged, np.mean(everybodys, axis=0).tolist(), strict=True))
        return whole

    def _last(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return the last batch's logs.

        They are the average weighted by samples, or the logs of the rank that has the batch.
        """
        rows = self._steps.rows.get(self._steps.kind)
        everybodys = allgather_object((0 if rows is None else int(rows), dict(own)), name="keras.metrics")
        weights = [each for each, _ in everybodys]
        if self._steps.kind == "test":
            last = max(place for place, weight in enumerate(weights) if weight or not any(weights))
            return dict(everybodys[last][1])
        if not any(weights):
            weights = [1] * len(weights)
        return {name: _mean([values[name] for _, values in everybodys], weights) for name in own}

    def _watch(self, variable: Any) -> None:
        """Record the variable if a step assigns a value to it instead of adding to it."""
        adds = [False]

        def within(plain: Callable[..., Any]) -> Callable[..., Any]:
            def add(value: Any) -> Any:
                adds[0] = True
                try:
                    return plain(value)
                finally:
                    adds[0] = False

            return add

        assign = variable.assign

        def noted(value: Any) -> Any:
            if not adds[0] and self._steps.runs_user_code:
                self._assigned.add(id(variable))
            return assign(value)

        variable.assign_add, variable.assign_sub = within(variable.assign_add), within(variable.assign_sub)
        variable.assign = noted


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in logs.items():
        plain = np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)
        if plain.size == 1 and plain.dtype.kind in "fiub":
            found[name] = float(plain.reshape(()))
    return found

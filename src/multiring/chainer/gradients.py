"""The gradients of a model of Chainer, averaged over the ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from multiring.errors import UnsupportedError
from multiring.frontend.process_sets import Members
from multiring.gradients.buckets import BUCKET_BYTES, GradientSpec
from multiring.gradients.options import Options
from multiring.gradients.reducer import GradientReducer

_Form = tuple[tuple[str, tuple[int, ...], str], ...]


def parameters_of(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters of `model` that have values, by name, in the order in which ranks know them.

    Raises:
        UnsupportedError: they are not in host memory.
    """
    found = [(name, each) for name, each in sorted(model.namedparams()) if each.array is not None]
    for name, each in found:
        if not isinstance(each.array, np.ndarray):
            raise UnsupportedError(
                f"parameter {name} is {type(each.array).__module__}.{type(each.array).__qualname__}; multiring moves "
                "host memory only so far: want model.to_cpu()"
            )
    return found


def form_of(model: Any) -> _Form:
    """Return what ranks must agree on of a model."""
    return tuple((name, each.array.shape, each.array.dtype.name) for name, each in parameters_of(model))


class ModelGradients:
    """The gradients of one model, in buckets; each reduction is started, and waited for, by all ranks."""

    def __init__(self, form: _Form, members: Members, compression: Any) -> None:
        specs = [(name, GradientSpec.row_major(dtype, shape)) for name, shape, dtype in form]
        options = Options(op="average", bucket_bytes=BUCKET_BYTES, compression=compression)
        self._reducer = GradientReducer(specs, members.group, options, parameters=self._values)
        members.reducers.add(self._reducer)
        self._has_started = False
        self._model: Any = None  # whose gradients are being averaged

    def _values(self) -> Sequence[Any] | None:
        return None if self._model is None else [each.array for _, each in parameters_of(self._model)]

    def start(self, model: Any, *, zero_fill: bool) -> None:
        """Take the model's gradients as they are, and start to average them; they may be changed at once.

        Args:
            model: of the form that this was made for.
            zero_fill: whether a parameter without gradient counts as one whose gradient is zero, also where no rank
                has one.
        """
        self._has_started = True
        self._model = model
        parameters = parameters_of(model)
        for index in reversed(range(len(parameters))):
            gradient = parameters[index][1].grad
            if gradient is None and zero_fill:
                gradient = np.zeros_like(parameters[index][1].array)
            self._reducer.bring(index, gradient)

    def finish(self) -> Sequence[Any] | None:
        """Return the averages that were started last, None among them where no rank has a gradient; None: of none.

        They hold until the next start.
        """
        if not self._has_started:
            return None
        self._has_started = False
        found = self._reducer.finish()
        self._model = None
        return found


def give(model: Any, gradients: Sequence[Any]) -> None:
    """Have the parameters of `model` these gradients, in place where they have some."""
    for (_, parameter), gradient in zip(parameters_of(model), gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.copy()
        else:
            parameter.grad[...] = gradient

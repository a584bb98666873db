"""Average the gradients of a Chainer model over the ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from multiring._frontend.process_sets import Members
from multiring._gradients.buckets import BUCKET_BYTES, GradientSpec
from multiring._gradients.options import GradientOptions
from multiring._gradients.reducer import GradientReducer
from multiring.errors import UnsupportedError

_Form = tuple[tuple[str, tuple[int, ...], str], ...]


def parameters_of(model: Any) -> list[tuple[str, Any]]:
    """Return (name, parameter) for all parameters with values, sorted by name.

    Raises:
        UnsupportedError: a parameter is not in host memory.
    """
    found = [(name, each) for name, each in sorted(model.namedparams()) if each.array is not None]
    for name, each in found:
        if not isinstance(each.array, np.ndarray):
            raise UnsupportedError(
                f"parameter {name} is {type(each.array).__module__}.{type(each.array).__qualname__}; multiring moves "
                "host memory only: call model.to_cpu()"
            )
    return found


def form_of(model: Any) -> _Form:
    """Return the names, shapes and types of a model's parameters.

    They must be the same on all ranks.
    """
    return tuple((name, each.array.shape, each.array.dtype.name) for name, each in parameters_of(model))


class ModelGradients:
    """The bucketed gradient reduction of one model.

    All ranks must start and finish each reduction.
    """

    def __init__(self, form: _Form, members: Members, compression: Any) -> None:
        specs = [(name, GradientSpec.row_major(dtype, shape)) for name, shape, dtype in form]
        options = GradientOptions(op="average", bucket_bytes=BUCKET_BYTES, compression=compression)
        self._reducer = GradientReducer(specs, members.group, options, parameters=self._values)
        members.reducers.add(self._reducer)
        self._has_started = False
        self._model: Any = None  # the model of the reduction in flight

    def _values(self) -> Sequence[Any] | None:
        return None if self._model is None else [each.array for _, each in parameters_of(self._model)]

    def start(self, model: Any, *, zero_fill: bool) -> None:
        """Copy the model's gradients and start to average them.

        The caller may change the gradients afterwards.

        Args:
            model: a model of the form for which this object was made.
            zero_fill: whether a missing gradient counts as zero, even if no rank has a gradient for the parameter.
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
        """Return the averages of the last started reduction, or None if none was started.

        The average of a parameter is None if no rank has a gradient for it. The arrays are valid until the next start.
        """
        if not self._has_started:
            return None
        self._has_started = False
        found = self._reducer.finish()
        self._model = None
        return found


def give(model: Any, gradients: Sequence[Any]) -> None:
    """Set the gradients of the parameters of `model`.

    If a parameter already has a gradient, the gradient is overwritten in place.

    A gradient that is None leaves its parameter unchanged.
    """
    for (_, parameter), gradient in zip(parameters_of(model), gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.copy()
        else:
            parameter.grad[...] = gradient

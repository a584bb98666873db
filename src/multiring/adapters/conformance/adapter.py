"""The description of a framework's adapter for the suite, and comparisons for the checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring._frontend import lifecycle
from multiring._frontend.process_sets import ProcessSet
from multiring._frontend.requests.failures import error_of
from multiring.errors import MultiringError

Array = NDArray[Any]


class Trainer(Protocol):
    """A model trained by plain gradient descent.

    The ranks of a process set average the gradients.
    """

    def step(self, slopes: Mapping[str, Array]) -> None:
        """Make one training step.

        The loss is the sum of parameter x slope over the parameters in `slopes`. The framework must compute the
        gradients of this loss, which are the slopes. Other parameters are not used.
        """

    def parameters(self) -> Mapping[str, Array]:
        """Return copies of the current parameters."""

    def state(self, **values: Any) -> Any:
        """Return the framework's elastic state of this model, with `values` as attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The functions of an adapter that the suite calls, and the checks to skip.

    Attributes:
        name: the framework's name, for the list of results.
        version: the framework's version.
        make: takes a NumPy array, and returns the framework's array with the same elements and type. If the framework
            has strides, they are the same as well.
        back: takes a result of `make` or `all_reduce`, and returns a NumPy array.
        all_reduce: `(array, op, *, name=None, process_set)` returns a new array of the framework, combined over the
            ranks; `op` is "sum", "average", "min", "max" or "product".
        trainer: `(parameters, rate, process_set)` returns a `Trainer` of float32 parameters, whose initial values may
            differ between ranks.
        gradient: `(at, weights, op)` returns the gradient of sum(all_reduce(x, op) * weights) at x = `at`, as the
            framework computes it.
        init: joins the job; takes `process_sets`.
        cannot: the checks to skip, by name, each with the reason: what the framework's own interface cannot express.
    """

    name: str
    version: str
    make: Callable[[Array], Any]
    back: Callable[[Any], Array]
    all_reduce: Callable[..., Any]
    trainer: Callable[[Mapping[str, Array], float, ProcessSet], Trainer]
    gradient: Callable[[Array, Array, str], Array] | None = None
    init: Callable[..., None] = lifecycle.init
    cannot: Mapping[str, str] = field(default_factory=dict)


class NonconformanceError(AssertionError):
    """An adapter failed a check."""


def require(condition: object, text: str) -> None:
    """Raise NonconformanceError unless `condition`."""
    if not condition:
        raise NonconformanceError(text)


def require_equal(found: Array, wanted: Any, what: str, *, rtol: float = 0.0) -> None:
    """Raise NonconformanceError unless shapes, types and elements are equal.

    NaN equals NaN.

    Args:
        found: the adapter's result.
        wanted: NumPy's result.
        what: the name of the result, for the error.
        rtol: the tolerance of elements, relative and absolute.
    """
    right = np.asarray(wanted)
    require(found.shape == right.shape, f"{what}: shape {found.shape}, want {right.shape}")
    require(found.dtype == right.dtype, f"{what}: {found.dtype}, want {right.dtype}")
    if found.tobytes() == right.tobytes():
        return
    is_plain = right.dtype.kind in "biu"
    ours, theirs = (found, right) if is_plain else (found.astype(np.complex128), right.astype(np.complex128))
    same = (ours == theirs) if is_plain else np.isclose(ours, theirs, rtol=rtol, atol=rtol, equal_nan=True)
    if not same.all():
        first = tuple(int(each) for each in np.argwhere(~same)[0])
        raise NonconformanceError(f"{what}: {found[first]} at {first}, want {right[first]}")


def kind_of(error: BaseException) -> BaseException:
    """Return multiring's error if it caused a framework's `error`; otherwise return `error`."""
    found = error if isinstance(error, MultiringError) else error_of(error)
    return error if found is None else found

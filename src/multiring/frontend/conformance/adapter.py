"""What the suite needs to know of a framework's adapter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.errors import MultiringError
from multiring.frontend import lifecycle
from multiring.frontend.process_sets import ProcessSet
from multiring.frontend.requests.failures import error_of

Array = NDArray[Any]


class Trainer(Protocol):
    """A model of some parameters, and plain descent by gradients that the ranks of a process set average."""

    def step(self, slopes: Mapping[str, Array]) -> None:
        """Make one step of the loss that is the sum of parameter x slope, over the parameters that `slopes` names.

        Its gradients, which the framework is to make, are the slopes. Parameters that are not named take no part.
        """

    def parameters(self) -> Mapping[str, Array]:
        """Return copies of the parameters as they are."""

    def state(self, **values: Any) -> Any:
        """Return the framework's elastic state of this model, with `values` as attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Five small functions, and what the framework's own interface cannot express.

    Attributes:
        name: of the framework, as results are listed.
        version: of the framework.
        make: returns the framework's array of the elements, type and, where it knows such, strides of a NumPy array.
        back: returns a NumPy array of what `make` and `all_reduce` return.
        all_reduce: `(array, op, *, name=None, process_set)` returns a new array of the framework, combined over the
            ranks; `op` is "sum", "average", "min", "max" or "product".
        trainer: `(parameters, rate, process_set)` returns a `Trainer` of float32 parameters, each rank's its own at
            first.
        gradient: `(at, weights, op)` returns the gradient of sum(all_reduce(x, op) * weights) at x = `at`, as the
            framework finds it.
        init: joins the job; takes `process_sets`.
        cannot: why checks, by name, are not for this framework: what its own interface cannot express.
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
    """An adapter does not do what every adapter must."""


def require(condition: object, text: str) -> None:
    """Raise NonconformanceError unless `condition`."""
    if not condition:
        raise NonconformanceError(text)


def require_equal(found: Array, wanted: Any, what: str, *, rtol: float = 0.0) -> None:
    """Raise NonconformanceError unless shape, type and elements are those wanted; NaN is NaN.

    Args:
        found: of the adapter.
        wanted: of NumPy.
        what: for the error.
        rtol: how far elements may be off, relatively.
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
    """Return multiring's error where a framework raised its own because of that; else `error`."""
    found = error if isinstance(error, MultiringError) else error_of(error)
    return error if found is None else found

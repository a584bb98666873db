"""The space of a study: which values each parameter may have.

A parameter is a list of choices, or a range: {"low": 1e-5, "high": 0.1, "log": True}. A range of whole
numbers gives whole numbers. A distribution of Optuna is taken as it is.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multiring.errors import ArgumentError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_KEYS = {"low", "high", "log", "step"}


def distributions_of(space: Any) -> "dict[str, BaseDistribution]":
    """Return Optuna's distribution of each parameter.

    Raises:
        ArgumentError: the space is empty or contradicts itself. The text names the parameter.
    """
    if not isinstance(space, Mapping) or not space:
        raise ArgumentError(f"space={space!r}: want a dict with at least one parameter, such as {{'batch': [32, 64]}}")
    found = {}
    for name, wanted in space.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"space: a parameter is called {name!r}; want a text")
        try:
            found[name] = _distribution(wanted)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"space: parameter {name!r} is {wanted!r}: {error}; want a list of choices, or a range such as "
                "{'low': 1e-5, 'high': 0.1, 'log': True}"
            ) from None
    return found


def _distribution(wanted: Any) -> "BaseDistribution":
    from optuna import distributions  # noqa: PLC0415 -- only the rank that holds the study needs Optuna

    if isinstance(wanted, distributions.BaseDistribution):
        _require_different(getattr(wanted, "choices", ()))
        return wanted
    if isinstance(wanted, Mapping):
        return _range(wanted, distributions)
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise TypeError(f"it is of type {type(wanted).__name__}")
    wanted = tuple(map(_plain, wanted)) if isinstance(wanted, tuple) else list(map(_plain, wanted))
    if isinstance(wanted, tuple) and len(wanted) == 2 and all(map(_is_number, wanted)):
        # Other libraries write a range so.
        low, high = wanted
        raise ValueError(
            f"two numbers may be two choices or a range; want [{low!r}, {high!r}], or {{'low': {low!r}, "
            f"'high': {high!r}}}"
        )
    _require_different(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a choice that no storage can keep
        try:
            return distributions.CategoricalDistribution(list(wanted))
        except Warning as error:
            raise ValueError(str(error)) from None


def _require_different(choices: Sequence[Any]) -> None:
    """Raise ValueError if Optuna would take one choice for another one: it compares them, and True equals 1."""
    for number, each in enumerate(choices):
        for other in choices[:number]:
            if repr(each) == repr(other):
                raise ValueError(f"it has a choice twice, {each!r}")
            if each == other:
                raise ValueError(
                    f"it has {other!r} and {each!r}, which are equal, so that only the first would be tried"
                )


def _range(wanted: Mapping[str, Any], distributions: Any) -> "BaseDistribution":
    low, high, step, log = (_plain(wanted.get(key)) for key in ("low", "high", "step", "log"))
    if unknown := sorted(map(str, set(wanted) - _KEYS)):
        raise ValueError(f"it has {', '.join(unknown)}, which a range has not")
    if not isinstance(log, bool | None):
        raise TypeError(f"log={log!r}: want True or False")
    numbers = [("low", low), ("high", high), *([] if step is None else [("step", step)])]
    for key, value in numbers:
        if not _is_number(value) or not math.isfinite(value):
            raise ValueError(f"{key}={value!r}: want a finite number")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the last step ends below `high`, which is an error here
        if all(isinstance(value, int) for _, value in numbers):
            found: BaseDistribution = distributions.IntDistribution(
                low, high, log=bool(log), step=1 if step is None else step
            )
        else:
            found = distributions.FloatDistribution(low, high, log=bool(log), step=step)
    last = vars(found)["high"]
    if step is not None and last < high:
        raise ValueError(f"steps of {step} from {low} do not reach {high}: the last is {last}")
    return found


def _plain(value: Any) -> Any:
    """Return a number of NumPy as Python's own, and anything else as it is."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "shape", None) == () else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def space_text(space: "Mapping[str, BaseDistribution]") -> str:
    """Return the space as text, which is equal for equal spaces."""
    from optuna.distributions import distribution_to_json  # noqa: PLC0415 -- as above

    return json.dumps({name: json.loads(distribution_to_json(each)) for name, each in sorted(space.items())})

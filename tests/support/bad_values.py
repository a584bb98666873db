"""Values that no argument of a kind may have, and values of NumPy that it must take."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from multiring.errors import MultiringError


class Odd:
    """An object that is nothing of what an argument may be."""

    def __repr__(self) -> str:
        return "an odd object"


_NO_NUMBERS: tuple[Any, ...] = (True, np.True_, "1", b"1", [], [1], {}, math.nan, Odd())
_NO_WHOLE: tuple[Any, ...] = (*_NO_NUMBERS, 2.5, np.float32(2.0), math.inf)
BAD: Mapping[str, tuple[Any, ...]] = {
    "count": (*_NO_WHOLE, None, 0, -1, np.int64(-1)),
    "count or None": (*_NO_WHOLE, 0, -1),
    "from zero": (*_NO_WHOLE, None, -1),
    "from zero or None": (*_NO_WHOLE, -1),
    "seed": (*_NO_WHOLE, None),
    "number": (*_NO_NUMBERS, None, math.inf, -math.inf, 10**400),
    "number or None": (*_NO_NUMBERS, math.inf),
    "flag": ("false", "no", "", 2, -1, 0.5, math.nan, None, [], Odd()),
    "function or None": (3, "f", True, Odd()),
    "function": (3, "f", True, Odd(), None),
    "path": ("", "a\0b", 3, b"a", None, True, [], Odd()),
    "choice": ("none of them", "", 3, True, [], Odd()),
    "data set": (3, None, "a", [], Odd()),
}
_GOOD: Mapping[str, tuple[Callable[[Any], Any], ...]] = {
    "count": (np.int64, np.int32, np.uint8),
    "count or None": (np.int64,),
    "from zero": (np.int64,),
    "from zero or None": (np.int64,),
    "seed": (np.int64, np.uint32),
    "number": (np.float64, np.float32),
    "number or None": (np.float32,),
    "flag": (np.bool_,),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call with valid arguments, and the kinds of the arguments that the test replaces."""

    title: str
    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    kinds: Mapping[str, str]

    def __str__(self) -> str:
        return self.title


def require_refused(case: Case) -> None:
    """Fail unless the call refuses each bad value by a text with its name or the value, and takes NumPy's scalars.

    One argument at a time is replaced.
    """
    case.call(**case.arguments)
    for name, kind in case.kinds.items():
        for value in BAD[kind]:
            with pytest.raises(MultiringError) as raised:
                _called(case, name, value)
            text = str(raised.value)
            assert name in text or repr(value) in text or str(value) in text, f"{case}({name}={value!r}): {text}"
        for convert in _GOOD.get(kind, ()):
            case.call(**{**case.arguments, name: convert(case.arguments[name])})


def _called(case: Case, name: str, value: Any) -> None:
    """Call with a bad value; say which it was if the call does not refuse it."""
    try:
        case.call(**{**case.arguments, name: value})
    except MultiringError:
        raise
    except Exception as error:
        raise AssertionError(f"{case}({name}={value!r}) raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"{case}({name}={value!r}) was accepted")

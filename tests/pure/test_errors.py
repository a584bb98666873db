"""Every error class states whether the Group is still usable, and has the fitting Python base class."""

import pytest

from multiring import errors
from multiring.errors import MultiringError

KINDS = {
    "ArgumentError": (ValueError, True),
    "DataError": (ValueError, True),
    "ScheduleError": (ValueError, True),
    "SourceTimeoutError": (TimeoutError, True),
    "UnsupportedError": (NotImplementedError, True),
    "MismatchError": (ValueError, True),
    "DisagreementError": (ValueError, True),
    "StateError": (RuntimeError, True),
    "RendezvousError": (RuntimeError, False),
    "PeerLostError": (ConnectionError, False),
    "StallError": (TimeoutError, False),
    "LaunchError": (RuntimeError, True),
}


def test_the_kinds_are_these() -> None:
    found = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, MultiringError)}
    assert found == {*KINDS, "MultiringError"}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_caught_as_python_calls_it_and_says_what_is_left(name: str) -> None:
    kind = getattr(errors, name)
    builtin, group_usable = KINDS[name]
    assert issubclass(kind, MultiringError)
    assert issubclass(kind, builtin)
    assert kind.group_usable is group_usable
    assert kind.__doc__
    assert str(kind("rank 3 left")) == "rank 3 left"

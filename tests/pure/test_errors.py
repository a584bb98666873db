"""Every error class states whether the Group is still usable, and has the fitting Python base class."""

import pickle

import pytest

from multiring import errors
from multiring._frontend.errors import _KINDS, HorovodInternalError, internal
from multiring.errors import CollectiveError, MultiringError

KINDS = {
    "ArgumentError": (ValueError, True),
    "DataError": (ValueError, True),
    "ScheduleError": (ValueError, True),
    "SourceTimeoutError": (TimeoutError, True),
    "UnsupportedError": (NotImplementedError, True),
    "CollectiveError": (RuntimeError, False),
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


@pytest.mark.parametrize("name", ["MismatchError", "DisagreementError", "PeerLostError", "StallError"])
def test_an_operation_that_failed_is_a_collective_error(name: str) -> None:
    assert issubclass(getattr(errors, name), CollectiveError)


@pytest.mark.parametrize("kind", _KINDS)
def test_an_adapter_raises_both(kind: type[MultiringError]) -> None:
    found = internal(kind("rank 3 left"), "allreduce")
    assert isinstance(found, CollectiveError)
    assert isinstance(found, kind)
    assert found.group_usable is kind.group_usable
    assert pickle.loads(pickle.dumps(found)).args == found.args  # noqa: S301 -- the test's own bytes


def test_horovods_name_is_an_alias() -> None:
    assert HorovodInternalError is CollectiveError

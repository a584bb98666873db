"""The nccl engine does not wait for ever for its device to end operations on which the ranks did not agree."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.nccl_device import OpenOperations
from multiring.errors import CollectiveError, StallError


def engine(call: Callable[[Callable[[], None]], None]) -> NcclEngine:
    """Return an engine without a device, whose device's thread calls functions by `call`."""
    made = object.__new__(NcclEngine)
    made._device = SimpleNamespace(call=call)  # type: ignore[assignment]
    made._communicator, made._suspicion, made._reported = None, None, None
    made._open, made.patience_s, made._abandons = OpenOperations(), 0.05, None
    return made


def test_a_device_that_does_not_answer_is_an_error() -> None:
    stuck = engine(lambda _: None)
    with pytest.raises(StallError, match=r"has not ended its operations 0\.05 s after .*: a and b; end the program"):
        stuck._abandon(CollectiveError("a and b"))
    assert isinstance(stuck._reported, StallError)  # the group's next operations raise it, on all ranks


def test_a_device_that_answers_lets_the_group_go_on() -> None:
    answering = engine(lambda function: threading.Thread(target=function).start())
    answering.patience_s = 60.0
    answering._abandon(CollectiveError("a and b"))
    assert answering._abandons is None
    assert answering._reported is None

"""A task of Spark releases the ports that it reserved, whatever ends it."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from multiring._launch.rank_keeper import RankKeeper
from multiring.spark import task


class Reserved:
    """Counts the releases of a reserved place."""

    releases = 0
    told = {"rendezvous": "@x", "torch_address": "127.0.0.1", "torch_port": 2001}  # noqa: RUF012 -- it is constant

    def __init__(self, *_: object, **__: object) -> None:
        return

    def release(self) -> None:
        Reserved.releases += 1


def lost(*_: object, **__: object) -> None:
    raise OSError("no more processes")


def gathered(message: str) -> list[str]:
    return [message]


def gathered_once() -> Callable[[str], list[str]]:
    """Return an exchange of messages that fails the second time, as when another task has died."""
    messages: list[str] = []

    def gather(message: str) -> list[str]:
        messages.append(message)
        if len(messages) > 1:
            raise RuntimeError("another task has died")
        return [message]

    return gather


@pytest.mark.parametrize(
    ("gather", "error"), [(gathered, "no more processes"), (gathered_once(), "another task has died")]
)
def test_an_error_releases_the_reserved_ports(
    gather: Callable[[str], list[str]], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 0, allGather=gather))
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(BarrierTaskContext=context))
    monkeypatch.setattr(task, "ReservedPlace", Reserved)
    monkeypatch.setattr(RankKeeper, "run", lost)
    monkeypatch.setattr(Reserved, "releases", 0)
    with pytest.raises((OSError, RuntimeError), match=error):
        task.keep_rank(b"", {}, "job", horovod=False)
    assert Reserved.releases == 1

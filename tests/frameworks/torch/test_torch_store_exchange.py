"""torch's store as a way to tell where to meet: leftovers of former runs, and a store that no agent serves."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from tests.support.free_ports import free_port
from torch._C._distributed_c10d import TCPStore

from multiring._exchanges import ExchangeError, TorchStoreExchange, fetch
from multiring.errors import LaunchError

JOB = "run-4"


@pytest.fixture
def served() -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)
    yield store
    del store


def way(port: int, job: str = JOB, *, is_served: bool = True) -> TorchStoreExchange:
    return TorchStoreExchange("127.0.0.1", port, job, is_served=is_served, limit_s=20.0)


def test_a_run_never_takes_what_a_former_run_has_left(served: TCPStore) -> None:
    former, reader = way(served.port), way(served.port)
    former.publish("former")
    assert reader.fetch(20.0) == "former"
    asked_and_killed = way(served.port)
    asked_and_killed.fetch(0.0)  # its question, and perhaps an answer, stay
    wait_for(lambda: served.check([f"multiring/{JOB}/question/2"]))
    former._stop.set()  # as if it was killed: its answers stay
    late = way(served.port)
    assert late.fetch(0.2) is None
    now = way(served.port)
    now.publish("now")
    assert late.fetch(20.0) == "now"
    for each in (former, reader, asked_and_killed, now, late):
        each.close()


def wait_for(condition: Callable[[], bool]) -> None:
    latest = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.01)


def test_jobs_with_one_store_are_kept_apart(served: TCPStore) -> None:
    first, other = way(served.port), way(served.port, "other-4")
    first.publish("first")
    assert other.fetch(0.3) is None
    wait_for(lambda: "rank 0 does not answer in the store at 127.0.0.1" in other.waits_for)
    first.close()
    other.close()


def test_answers_are_removed(served: TCPStore) -> None:
    first, others = way(served.port), [way(served.port) for _ in range(3)]
    first.publish("x")
    assert [each.fetch(20.0) for each in others] == ["x"] * 3
    first.close()
    # The number of questions, and each question.
    assert served.num_keys() == 1 + 3


def test_without_an_agent_rank_0_serves_the_store_for_torch_too() -> None:
    port = free_port()
    first, second = way(port, is_served=False), way(port, is_served=False)
    first.publish("x")
    assert second.fetch(20.0) == "x"
    torchs = TCPStore(
        "127.0.0.1", port, 1, True, timeout=timedelta(seconds=20), wait_for_workers=False, multi_tenant=True
    )
    first.close()
    second.close()
    torchs.set("key", "value")
    assert torchs.get("key") == b"value"


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    closed = TorchStoreExchange("127.0.0.1", port, JOB, is_served=True, limit_s=1.0)
    with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}: "):
        closed.fetch(60.0)
    with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}: "):
        TorchStoreExchange("127.0.0.1", port, JOB, is_served=True, limit_s=1.0).publish("x")


def test_a_store_that_comes_after_torchs_own_patience_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._exchanges.torch_store._CONNECT_S", 0.3)
    port = free_port()
    reader = TorchStoreExchange("127.0.0.1", port, JOB, is_served=False, limit_s=60.0)
    assert reader.fetch(2.0) is None
    assert str(port) in reader.waits_for
    first = TorchStoreExchange("127.0.0.1", port, JOB, is_served=False, limit_s=60.0)
    first.publish("x")
    assert reader.fetch(60.0) == "x"
    first.close()
    reader.close()


SERVE = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen((sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("asked", [False, True], ids=["before it is asked", "after it was asked"])
def test_a_store_that_falls_silent_keeps_nobody_waiting(
    server: tuple[subprocess.Popen[str], int], *, asked: bool
) -> None:
    process, port = server
    reader = TorchStoreExchange("127.0.0.1", port, JOB, is_served=True, limit_s=2.0)
    if asked:
        reader.fetch(0.0)
        wait_for(lambda: "rank 0 does not answer" in reader.waits_for)
    first = TorchStoreExchange("127.0.0.1", port, JOB, is_served=True, limit_s=2.0)
    if asked:
        first.publish("x")
        assert reader.fetch(60.0) == "x"
        reader = TorchStoreExchange("127.0.0.1", port, "other", is_served=True, limit_s=2.0)
        reader.fetch(0.0)
        wait_for(lambda: "rank 0 does not answer" in reader.waits_for)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=rf"not told where to meet.*127\.0\.0\.1:{port}"):
        fetch([reader], 3.0, "advice", lambda _: None)
    if not asked:
        with pytest.raises(ExchangeError, match=f"127.0.0.1:{port}"):
            first.publish("x")
    first.close()
    assert time.monotonic() - began < 60

"""The ways by which the ranks of a foreign launcher tell each other where to meet, without Slurm.

tests/slurm has them with a real Slurm, PMI-2, PMIx and munge.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.free_ports import free_port

from multiring._exchanges import ExchangeError, PlaceExchange, SlurmStep, fetch, publish, ways_of_step
from multiring._exchanges.munge import MungeExchange, _ports_of, _serve
from multiring._exchanges.pmi2 import Pmi2Exchange
from multiring._exchanges.pmix import PmixExchange
from multiring._exchanges.shared_file import SharedFileExchange
from multiring._exchanges.slurm import hosts_of
from multiring._runtime.bootstrap.addresses import TcpAddress, listen
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous import meet
from multiring._runtime.bootstrap.rendezvous_client import Client
from multiring._runtime.bootstrap.rendezvous_link import TimeLimit
from multiring._runtime.bootstrap.rendezvous_point import meet_by_exchange
from multiring._runtime.job.joining import join_job
from multiring._settings import Settings
from multiring.errors import ArgumentError, LaunchError, RendezvousError

STEP = "77.3.0-abcd"


# -- all ways together


class Board(PlaceExchange):
    """A way that is a dictionary, or that fails."""

    def __init__(
        self, name: str, texts: dict[str, str], *, fails: str = "", reaches_all: bool = False, is_last: bool = False
    ) -> None:
        super().__init__()
        self.name, self.texts, self.fails, self.reaches_all = name, texts, fails, reaches_all
        self.is_last_resort = is_last
        self.closed = 0

    def publish(self, text: str) -> bool:
        if self.fails:
            raise ExchangeError(self.fails)
        self.texts[self.name] = text
        return self.reaches_all

    def fetch(self, wait_s: float) -> str | None:
        del wait_s
        if self.fails:
            raise ExchangeError(self.fails)
        return self.texts.get(self.name)

    def close(self) -> None:
        self.closed += 1


def say(_: Callable[[], str]) -> None:
    """Say nothing."""


def test_rank_0_uses_ways_until_one_surely_reaches_all() -> None:
    texts: dict[str, str] = {}
    ways = [Board("a", texts), Board("b", texts, reaches_all=True), Board("c", texts)]
    publication = publish(ways, "here", "advice")
    assert texts == {"a": "here", "b": "here"}
    publication.close()
    assert [way.closed for way in ways] == [1, 1, 0]


def test_a_way_of_last_resort_is_used_only_where_no_other_works() -> None:
    texts: dict[str, str] = {}
    publish([Board("a", texts), Board("file", texts, is_last=True)], "here", "advice")
    assert texts == {"a": "here"}
    publish([Board("a", texts, fails="no"), Board("file", texts, is_last=True)], "there", "advice")
    assert texts == {"a": "here", "file": "there"}


def test_a_way_of_last_resort_is_also_used_once_the_ranks_have_not_met_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("multiring._exchanges.publishing._LAST_RESORT_S", 0.3)
    file = SharedFileExchange(STEP, [tmp_path])
    publication = publish([Board("a", {}), file], "here", "advice")
    # The other host lacks the first way.
    ways = [Board("a", {}, fails="not on this host"), SharedFileExchange(STEP, [tmp_path])]
    assert fetch(ways, 60.0, "advice", say) == "here"
    publication.close()
    assert list(tmp_path.iterdir()) == []
    publish([Board("a", {}), file], "here", "advice").close()
    publish([Board("a", {}, reaches_all=True), file], "here", "advice")
    publish([Board("a", {}), Board("b", {}, reaches_all=True), file], "here", "advice")
    time.sleep(1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_way_of_last_resort_that_hangs_is_closed_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LAST_RESORT_S", "_END_S"):
        monkeypatch.setattr(f"multiring._exchanges.publishing.{name}", 0.1)
    began, goes_on = threading.Event(), threading.Event()

    class Hanging(Board):
        def publish(self, text: str) -> bool:
            began.set()
            goes_on.wait(240)
            return super().publish(text)

    hanging = Hanging("file", {}, is_last=True)
    publication = publish([Board("a", {}), hanging], "here", "advice")
    assert began.wait(240)
    publication.close()
    assert hanging.closed == 0
    goes_on.set()
    wait_for(lambda: hanging.closed == 1)


def test_rank_0_stops_telling_once_all_have_met_and_before_any_can_leave_init(monkeypatch: pytest.MonkeyPatch) -> None:
    board, closed = Board("a", {}), list[int]()
    told = publish([board], "here", "advice")
    monkeypatch.setattr("multiring._runtime.job.joining.check_engines", lambda _: closed.append(board.closed))
    known = Identity(
        rank=0,
        size=1,
        local_rank=None,
        local_size=None,
        rendezvous="",
        secret=b"",
        job="",
        source="srun",
        publication=told,
    )
    join_job(Settings(), known).close(0.0, announce=True)
    assert closed == [1]


def test_a_rank_without_a_way_of_rank_0_takes_another() -> None:
    texts: dict[str, str] = {}
    publish([Board("a", texts), Board("b", texts)], "here", "advice")
    ways = [Board("a", texts, fails="not on this host"), Board("b", texts)]
    assert fetch(ways, 5.0, "advice", say) == "here"
    assert [way.closed for way in ways] == [1, 1]


def test_a_text_that_a_former_program_has_left_is_passed_over() -> None:
    stale, good = Board("a", {"a": "old"}), Board("b", {"b": "new"})
    stale.may_be_stale = True

    def fault_of(text: str) -> str:
        return "it is old" if text == "old" else ""

    assert fetch([stale, good], 20.0, "advice", say, fault_of) == "new"
    with pytest.raises(
        LaunchError, match=r"a: only what a former program of this step has left \(it is old\)\. advice"
    ):
        fetch([stale], 0.5, "advice", say, fault_of)
    stale.texts["a"] = "new"
    assert fetch([stale], 20.0, "advice", say, fault_of) == "new"
    # The text of another way is never a leftover; nobody is asked.
    assert fetch([Board("c", {"c": "old"})], 20.0, "advice", say, fault_of) == "old"


def placed(rank: int, **values: Any) -> Identity:
    known = {"rank": rank, "size": 2, "local_rank": None, "local_size": None, "rendezvous": "", "secret": b""}
    return Identity(**{**known, "job": "", "source": "srun", **values})


@pytest.mark.parametrize("taken", [False, True], ids=["nobody", "the present rank 0"])
def test_ranks_meet_the_present_rank_0_where_the_former_ones_text_is_found_first(*, taken: bool) -> None:
    listener = listen(TcpAddress("127.0.0.1", 0))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        place, other = (f"127.0.0.1:{each.getsockname()[1]}" for each in (listener, closed))
        told = {"rendezvous": place, "secret": "11" * 32, "job": "new"}
        first = placed(0, rendezvous=place, secret=bytes.fromhex("11" * 32), job="new", listener=listener)
        met: list[object] = []
        thread = threading.Thread(target=lambda: met.append(meet(first, {"of": 0}, timeout_s=60.0)), daemon=True)
        thread.start()
        # A rank 0 with MULTIRING_PORTS takes the port of its forerunner.
        stale = Board(
            "a", {"a": json.dumps({"rendezvous": place if taken else other, "secret": "22" * 32, "job": "old"})}
        )
        stale.may_be_stale = True
        fresh = Board("b", {"b": json.dumps(told)})
        fresh.may_be_stale = True
        known = meet_by_exchange(Settings(init_timeout_s=60.0), placed(1), [stale, fresh])
        assert (known.rendezvous, known.job) == (place, "new")
        assert meet(known, {"of": 1}, timeout_s=60.0) == [{"of": 0}, {"of": 1}]
        thread.join()
        assert met == [[{"of": 0}, {"of": 1}]]


@pytest.mark.parametrize(
    ("of_rank_0", "here", "error"),
    [
        ("of the user", None, "this rank has none, but rank 0 has one"),
        (None, "of the user", "this rank has, but rank 0 has none"),
    ],
)
def test_a_secret_on_some_ranks_only_is_no_leftover(of_rank_0: str | None, here: str | None, error: str) -> None:
    """The error comes at once, and not as a way that tells nothing until the time is over."""
    listener = listen(TcpAddress("127.0.0.1", 0))
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    secret = b"\x11" * 32 if of_rank_0 is None else of_rank_0.encode()
    first = placed(0, rendezvous=place, secret=secret, job="new", listener=listener)

    def wait() -> None:
        with suppress(RendezvousError):
            meet(first, {"of": 0}, timeout_s=5.0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    told = {"rendezvous": place, "secret": secret.hex() if of_rank_0 is None else "", "job": "new"}
    way = Board("a", {"a": json.dumps(told)})
    way.may_be_stale = True
    began = time.monotonic()
    with pytest.raises(LaunchError, match=error):
        meet_by_exchange(Settings(init_timeout_s=120.0, secret=here), placed(1), [way])
    assert time.monotonic() - began < 60.0
    thread.join()


def test_a_rank_0_that_is_slow_or_out_of_reach_is_no_leftover() -> None:
    # It listens, but does not greet yet.
    with socket.create_server(("127.0.0.1", 0)) as slow:
        address = TcpAddress("127.0.0.1", slow.getsockname()[1])
        assert Client(placed(1), address, "1", TimeLimit(0.3)).fault_of_place() == ""
    refused = Client(placed(1), address, "1", TimeLimit(0.3)).fault_of_place()
    assert refused == f"{address}: Connection refused"
    assert Client(placed(1), TcpAddress("host.invalid", 9), "1", TimeLimit(0.3)).fault_of_place() == ""


def test_errors_name_all_ways_and_why_each_failed() -> None:
    broken = [Board("a", {}, fails="no socket"), Board("b", {}, fails="no library")]
    with pytest.raises(LaunchError, match=r"rank 0 found no way.*a: no socket; b: no library\. advice"):
        publish(broken, "here", "advice")
    with pytest.raises(LaunchError, match=r"not told where to meet: a: no socket; b: no library\. advice"):
        fetch(broken, 5.0, "advice", say)
    late = [Board("a", {}, fails="no socket"), Board("b", {})]
    with pytest.raises(LaunchError, match=r"within 0\.1 s: a: no socket; b: rank 0 has not told it\. advice"):
        fetch(late, 0.1, "advice", say)
    assert [way.closed for way in late] == [1, 1]


# -- a file


def test_a_file_is_for_its_user_alone_and_is_removed(tmp_path: Path) -> None:
    first, second = (SharedFileExchange(STEP, [tmp_path / "gone", tmp_path]) for _ in range(2))
    assert second.fetch(0.0) is None
    assert "No such file" in second.waits_for
    assert first.publish("secret") is False
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert second.fetch(0.0) == "secret"
    second.close()
    assert path.exists()
    first.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["readable", "link", "hard", "pipe", "text", "other step"])
def test_a_file_that_another_user_may_have_made_is_not_read(tmp_path: Path, fault: str) -> None:
    path = tmp_path / f".multiring-{STEP}"
    good = json.dumps({"step": STEP, "text": "x"})
    match fault:
        case "readable":
            path.write_text(good)
            path.chmod(0o640)
        case "link":
            (tmp_path / "target").write_text(good)
            (tmp_path / "target").chmod(0o600)
            path.symlink_to(tmp_path / "target")
        case "hard":
            (tmp_path / "target").write_text(good)
            (tmp_path / "target").chmod(0o600)
            os.link(tmp_path / "target", path)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "text":
            path.write_text(good[:-3])
            path.chmod(0o600)
        case _:
            path.write_text(json.dumps({"step": "77.4.0-abcd", "text": "x"}))
            path.chmod(0o600)
    way = SharedFileExchange(STEP, [tmp_path])
    assert way.fetch(0.0) is None
    assert str(path) in way.waits_for


def test_a_run_removes_what_former_runs_have_left_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        ".multiring-77.3.0-abcd",
        ".multiring-77.3.1-abcd",
        ".multiring-77.31.0-abcd",
        ".multiring-7.3.0-abcd",
    ):
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(0o600)
    way = SharedFileExchange("77.3.1-abcd", [tmp_path])
    way.publish("new")
    assert SharedFileExchange("77.3.1-abcd", [tmp_path]).fetch(0.0) == "new"
    way.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".multiring-7.3.0-abcd", ".multiring-77.31.0-abcd"]


def test_parts_of_a_job_with_the_same_numbers_leave_each_others_files(tmp_path: Path) -> None:
    one, other = (SharedFileExchange(f"77.3.1-{hosts}", [tmp_path]) for hosts in ("abcd", "ef01"))
    one.publish("of one")
    (tmp_path / ".multiring-77.3.0-ef02").write_text("of a former run, on other hosts")
    (tmp_path / ".multiring-77.3.0-ef02").chmod(0o600)
    other.publish("of the other")
    assert SharedFileExchange("77.3.1-abcd", [tmp_path]).fetch(0.0) == "of one"
    assert SharedFileExchange("77.3.1-ef01", [tmp_path]).fetch(0.0) == "of the other"
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / f".multiring-{STEP}"
    path.write_text(json.dumps({"step": STEP, "text": "x"}))
    path.chmod(0o600)
    os.chown(path, 7001, 7001)
    way = SharedFileExchange(STEP, [tmp_path])
    with pytest.raises(ExchangeError, match=f"no folder can be written to: {tmp_path}: File exists"):
        way.publish("new")
    assert way.fetch(0.0) is None
    assert "user 7001" in way.waits_for
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


# -- PMI-2


class Stepd:
    """slurmstepd's end of PMI-2 for `size` ranks. It records the words that it gets."""

    def __init__(self, size: int) -> None:
        self.ends = [socket.socketpair() for _ in range(size)]
        self.words: list[str] = []
        self._values: dict[str, str] = {}
        self._fence = threading.Barrier(size)
        self._threads = [threading.Thread(target=self._serve, args=(ours,), daemon=True) for ours, _ in self.ends]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._fence.abort()
        for _, theirs in self.ends:
            theirs.close()
        for thread in self._threads:
            thread.join()

    def number(self, rank: int) -> str:
        return str(self.ends[rank][1].fileno())

    def _serve(self, end: socket.socket) -> None:
        with suppress(OSError, ValueError, threading.BrokenBarrierError), end, end.makefile("rwb") as stream:
            if stream.readline() != b"cmd=init pmi_version=2 pmi_subversion=0\n":
                return
            stream.write(b"cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n")
            stream.flush()
            while length := stream.read(6):
                asked = dict(word.split("=", 1) for word in stream.read(int(length)).decode().split(";") if word)
                self.words.append(asked["cmd"])
                if asked["cmd"] == "fullinit" and not (asked["pmijobid"] and asked["pmirank"]):
                    return  # as slurmstepd does
                text = f"cmd={asked['cmd']}-response;{self._answer(asked)}rc=0;"
                stream.write(f"{len(text):6d}{text}".encode())
                stream.flush()

    def _answer(self, asked: dict[str, str]) -> str:
        match asked["cmd"]:
            case "kvs-put":
                assert len(asked["value"]) <= 1024
                self._values[asked["key"]] = asked["value"]
            case "kvs-fence":
                self._fence.wait()
            case "kvs-get":
                value = self._values.get(asked["key"])
                return "found=FALSE;" if value is None else f"found=TRUE;value={value};"
        return ""


@pytest.fixture
def stepd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepd]:
    monkeypatch.setattr("multiring._exchanges.pmi2.os.getpid", lambda: 1)  # the server is a thread of this process
    monkeypatch.setattr("multiring._exchanges.pmi2.os.getuid", lambda: 4711)
    made = Stepd(2)
    yield made
    made.close()


@pytest.mark.parametrize("text", ["{}", "x;y=z;;", "long" * 1000])
def test_pmi_2_carries_any_text(stepd: Stepd, text: str) -> None:
    first, second = Pmi2Exchange(stepd.number(0), "77.3", "0"), Pmi2Exchange(stepd.number(1), "77.3", "1")
    assert second.fetch(0.05) is None
    assert first.publish(text) is True
    assert second.fetch(5.0) == text
    first.close()
    second.close()
    assert stepd.words.count("finalize") == 2
    assert os.get_blocking(int(stepd.number(0)))


def test_a_rank_0_whose_fence_does_not_end_goes_on(stepd: Stepd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._exchanges.pmi2._FENCE_S", 0.1)
    way = Pmi2Exchange(stepd.number(0), "77.3", "0")
    assert way.publish("x") is False
    way.close()
    assert "finalize" not in stepd.words


def test_a_rank_that_met_otherwise_ends_pmi_once_the_fence_has_ended(
    stepd: Stepd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiring._exchanges.pmi2._FENCE_S", 0.1)
    first, second = Pmi2Exchange(stepd.number(0), "77.3", "0"), Pmi2Exchange(stepd.number(1), "77.3", "1")
    assert first.publish("x") is False
    first.close()
    first.close()
    assert second.fetch(20.0) == "x"
    second.close()
    wait_for(lambda: stepd.words.count("finalize") == 2)


def wait_for(condition: Callable[[], bool]) -> None:
    latest = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.01)


def test_pmi_fd_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="PMI_FD is not set"):
        Pmi2Exchange(None).publish("x")
    with (tmp_path / "file").open("wb") as file, pytest.raises(ExchangeError, match="not a socket any more"):
        Pmi2Exchange(str(file.fileno())).publish("x")
    assert (tmp_path / "file").read_bytes() == b""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ExchangeError, match="this user's own socket"):
        Pmi2Exchange(str(theirs.fileno())).publish("x")
    with socket.socket() as other, pytest.raises(ExchangeError, match="is another socket"):
        Pmi2Exchange(str(other.fileno())).publish("x")
    for closed in ("99999", "x"):
        with pytest.raises(ExchangeError, match="a wrapper has closed it"):
            Pmi2Exchange(closed).publish("x")


def test_a_pmi_that_was_used_already_is_not_waited_for(stepd: Stepd) -> None:
    stepd.ends[0][0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ExchangeError, match=r"closed it|used it already"):
        Pmi2Exchange(stepd.number(0), "77.3", "0").fetch(5.0)


# -- PMIx and munge: what needs neither


def test_pmix_without_a_server_says_so() -> None:
    with pytest.raises(ExchangeError, match="PMIX_NAMESPACE is not set"):
        PmixExchange(None).fetch(0.1)


def test_a_process_uses_pmix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # What rank 0 has put stays in the nodes' servers, so a second use would find the first text.
    class Library:
        def __getattr__(self, _: str) -> Callable[..., int]:
            return lambda *_: 0

    monkeypatch.setattr("multiring._exchanges.pmix._load", Library)
    monkeypatch.setattr("multiring._exchanges.pmix._used", set())
    first = PmixExchange("slurm.pmix.77.3")
    assert first.publish("x") is False
    first.close()
    with pytest.raises(ExchangeError, match="this process has used it already"):
        PmixExchange("slurm.pmix.77.3").publish("y")
    with pytest.raises(ExchangeError, match="this process has used it already"):
        PmixExchange("slurm.pmix.77.3").fetch(0.1)
    assert PmixExchange("slurm.pmix.77.4").publish("z") is False


class SilentLibrary:
    """PMIx of which one call does not return before `awaken`."""

    def __init__(self, silent: str) -> None:
        self._silent, self.calls, self.awaken = silent, list[str](), threading.Event()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.calls.append(name)
            if name == self._silent:
                self.awaken.wait(240)
            return -46 if name == "PMIx_Get" else 0  # PMIX_ERR_NOT_FOUND

        return call


@pytest.mark.parametrize("silent", ["PMIx_Get", "PMIx_Init", "PMIx_Put", "PMIx_Commit", "PMIx_Finalize"])
def test_pmix_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    library = SilentLibrary(silent)
    monkeypatch.setattr("multiring._exchanges.pmix._load", lambda: library)
    monkeypatch.setattr("multiring._exchanges.pmix._used", set())
    monkeypatch.setattr("multiring._exchanges.pmix._ANSWER_S", 0.2)
    monkeypatch.setattr("multiring._exchanges.pmix._END_S", 0.2)
    way = PmixExchange("slurm.pmix.77.3")
    if silent == "PMIx_Get":
        assert way.fetch(0.1) is None
        assert way.fetch(0.1) is None
        assert way.waits_for == "PMIx_Get has not returned"
    elif silent == "PMIx_Finalize":
        assert way.publish("x") is False
    else:
        with pytest.raises(ExchangeError, match=f"{silent} does not return for 0.2 s"):
            way.publish("x")
    way.close()
    assert library.calls.count(silent) == 1
    # The library must not end while one of its calls lasts.
    assert ("PMIx_Finalize" in library.calls) == (silent == "PMIx_Finalize")
    library.awaken.set()


def test_pmix_whose_question_ends_in_time_is_finalized(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SilentLibrary("PMIx_Get")
    monkeypatch.setattr("multiring._exchanges.pmix._load", lambda: library)
    monkeypatch.setattr("multiring._exchanges.pmix._used", set())
    way = PmixExchange("slurm.pmix.77.3")
    assert way.fetch(0.1) is None
    library.awaken.set()
    way.close()
    assert library.calls[-1] == "PMIx_Finalize"


@pytest.fixture
def plain_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts travel as they are."""
    monkeypatch.setattr("multiring._exchanges.munge._program", lambda name: name)
    for name in ("_encode", "_decode"):
        monkeypatch.setattr(f"multiring._exchanges.munge.{name}", lambda data: data)


@pytest.mark.usefixtures("plain_munge")
def test_munge_is_served_at_all_addresses_and_after_a_failed_accept() -> None:
    port = free_port()
    first = MungeExchange(STEP, ("127.0.0.1",), (port, port))
    first.publish("x")
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            assert MungeExchange(STEP, (host,), (port, port)).fetch(5.0) == "x"
        other = MungeExchange("77.4.0-abcd", ("127.0.0.1",), (port, port))
        assert other.fetch(20.0) is None
        assert f"127.0.0.1:{port}" in other.waits_for
    finally:
        first.close()


@pytest.mark.usefixtures("plain_munge")
def test_a_listener_that_never_ends_its_answer_does_not_hold_a_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    resolve = socket.getaddrinfo

    def resolving(host: str, *more: Any, **named: Any) -> Any:
        resolved.append(host)
        return resolve(host, *more, **named)

    other = free_port()
    with socket.create_server(("127.0.0.1", 0)) as trickling:
        port = trickling.getsockname()[1]

        def trickle() -> None:
            while True:
                try:
                    talk, _ = trickling.accept()
                except OSError:  # the test has ended
                    return
                with talk, suppress(OSError):
                    while not is_over.wait(0.05):
                        talk.sendall(b" ")

        is_over = threading.Event()
        threading.Thread(target=trickle, daemon=True).start()
        held_up = MungeExchange(STEP, ("localhost",), (port, port))
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            for limit in ("_TALK_S", "_ROUND_S"):
                patch.setattr(f"multiring._exchanges.munge.{limit}", 200.0)
            assert held_up.fetch(0.1) is None  # the other ways get their turn
        assert time.monotonic() - began < 100  # a talk may take twice as long
        monkeypatch.setattr("multiring._exchanges.munge._ROUND_S", 0.5)
        monkeypatch.setattr("multiring._exchanges.munge.socket.getaddrinfo", resolving)
        first = MungeExchange(STEP, ("localhost",), (other, other))
        first.publish("x")
        way = MungeExchange(STEP, ("localhost",), (port, port))
        way._ports = [port, other]
        assert next(text for _ in range(100) if (text := way.fetch(0.5)) is not None) == "x"
        first.close()
        is_over.set()
    # Once a round, and not for each port.
    assert resolved.count("localhost") == way._turn


@pytest.mark.usefixtures("plain_munge")
def test_munges_listener_outlives_a_failed_accept() -> None:
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EINVAL, "Invalid argument")]

    class Listener(socket.socket):
        def accept(self) -> NoReturn:
            raise failures.pop(0)

    with Listener() as listener:
        _serve(listener, STEP, "x")
    assert failures == []


@pytest.mark.parametrize("has_gone", [False, True])
def test_munges_listener_does_not_decode_what_a_caller_asked_that_has_gone(
    *, has_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 ranks at once would keep it busy with the questions of those who have gone."""
    decoded: list[bytes] = []
    is_free = threading.Event()

    def decode(data: bytes) -> bytes:
        decoded.append(data)
        is_free.wait(240)
        raise ExchangeError("of no interest")

    monkeypatch.setattr("multiring._exchanges.munge._decode", decode)
    monkeypatch.setattr("multiring._exchanges.munge._MOST_CALLERS", 1)
    monkeypatch.setattr("multiring._exchanges.munge._TALK_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=_serve, args=(listener, STEP, "x"), daemon=True)
        serving.start()
        talks = []
        for question in (b"first", b"second"):
            talks.append(socket.create_connection(listener.getsockname(), 30))
            talks[-1].sendall(question)
            talks[-1].shutdown(socket.SHUT_WR)
            while not decoded:
                time.sleep(0.01)
        if has_gone:  # the first question has taken more than the time that a caller waits
            monkeypatch.setattr("multiring._exchanges.munge._TALK_S", -1.0)
        is_free.set()
        for talk in talks:
            with talk, suppress(ConnectionResetError):  # because of what it has not read
                talk.settimeout(60)
                assert talk.recv(1) == b""
        listener.shutdown(socket.SHUT_RDWR)
    assert decoded == ([b"first"] if has_gone else [b"first", b"second"])


@pytest.mark.usefixtures("plain_munge")
def test_a_question_that_comes_back_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reflect() -> None:
            talk, _ = listener.accept()
            with talk:
                while part := talk.recv(1 << 16):
                    talk.sendall(part)

        thread = threading.Thread(target=reflect, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        way = MungeExchange(STEP, ("127.0.0.1",), (port, port))
        assert way.fetch(20.0) is None
        thread.join()
    assert "it sends the question back" in way.waits_for


def test_munge_that_fails_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._exchanges.munge._program", lambda name: name)

    def fails(_: bytes) -> bytes:
        raise ExchangeError("munge: munged does not answer")

    monkeypatch.setattr("multiring._exchanges.munge._encode", fails)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        way = MungeExchange(STEP, ("127.0.0.1",), (port, port))
        assert way.fetch(20.0) is None
    assert "munged does not answer" in way.waits_for


def test_rank_0_tells_the_others_that_its_settings_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._runtime.bootstrap.rendezvous_point._LAST_WORDS_S", 0.0)
    known = Identity(rank=0, size=2, local_rank=None, local_size=None, rendezvous="", secret=b"", job="", source="srun")
    for wrong in (Settings(secret_file=str(tmp_path / "none")), Settings(interface="no-such-interface")):
        texts: dict[str, str] = {}
        with pytest.raises(LaunchError, match=r"rank 0 cannot listen: .*(No such file|no-such-interface)"):
            meet_by_exchange(wrong, known, [Board("a", texts)])
        assert "error" in json.loads(texts["a"])


def test_munge_without_its_commands_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExchangeError, match="no program munge here"):
        MungeExchange(STEP, ("localhost",), None).publish("x")
    with pytest.raises(ExchangeError, match="no program munge here"):
        MungeExchange(STEP, ("localhost",), None).fetch(0.1)
    with pytest.raises(ExchangeError, match="hosts are not known"):
        MungeExchange(STEP, (), None).fetch(0.1)


def test_munge_names_the_ports_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr("multiring._exchanges.munge.shutil.which", lambda name: f"/usr/bin/{name}")
    way = MungeExchange(STEP, ("127.0.0.1",), (port, port))
    assert way.fetch(20.0) is None
    assert way.waits_for == f"rank 0 answers on none of the ports {port} (127.0.0.1:{port}: Connection refused)"


@pytest.mark.parametrize(("ports", "count"), [((7000, 7100), 8), ((7000, 7002), 3), ((9, 9), 1)])
def test_munge_uses_ports_of_the_range_that_the_step_determines(ports: tuple[int, int], count: int) -> None:
    tried = list(_ports_of(STEP, ports))
    assert len(set(tried)) == len(tried) == count
    assert all(ports[0] <= port <= ports[1] for port in tried)
    assert tried == list(_ports_of(STEP, ports))
    assert count < 8 or tried != list(_ports_of("77.4.0-abcd", ports))


# -- the step


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("", []),
        ("gpu7", ["gpu7"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("a-b.c,d[0]-x", ["a-b.c", "d0-x"]),
    ],
)
def test_slurms_short_form_of_hosts(listed: str, hosts: list[str]) -> None:
    assert list(hosts_of(listed)) == hosts


@pytest.mark.parametrize("listed", ["gpu[1-3", "gpu1]", "gpu[a-b]", "gpu[1-]x", "gpu[]"])
def test_what_is_no_list_of_hosts(listed: str) -> None:
    with pytest.raises(ArgumentError, match="SLURM_STEP_NODELIST"):
        hosts_of(listed)


def test_steps_restarts_and_parts_of_a_job_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    one = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_SUBMIT_DIR": "/s"}
    others = [{}, {"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    others += [{"SLURM_STEP_NODELIST": "a[3-4]"}]
    steps = [SlurmStep.of({**one, **other}, (5, 9)) for other in others]
    assert len({step.name for step in steps}) == len(others)
    assert steps[0].hosts == ("a1", "a2")
    assert steps[0].folders == (Path("/s"), Path("/home/x"))
    names = [way.name for way in ways_of_step(steps[0], one)]
    assert names == ["PMI-2", "PMIx", "munge", "file"]

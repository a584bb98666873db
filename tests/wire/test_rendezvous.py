"""Rendezvous of ranks, successful or not: ranks are threads, or processes if a test kills one."""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.support.crowd import Crowd
from tests.support.free_ports import free_port

from multiring._runtime.bootstrap import rendezvous_client, rendezvous_link, rendezvous_server, waiting_lines
from multiring._runtime.bootstrap.addresses import PeerCredentials, listen, parse_address
from multiring._runtime.bootstrap.handshake import PROTOCOL, FrameReader, encode, frame
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous import Rendezvous, meet
from multiring._runtime.bootstrap.rendezvous_client import Client
from multiring._runtime.bootstrap.rendezvous_link import TimeLimit
from multiring._runtime.job import joining
from multiring._settings import Settings
from multiring._version import VERSION
from multiring.errors import ArgumentError, RendezvousError

DEADLINE_S = 240.0
PATIENT_S = 100.0  # the time-out of ranks that meet: 64 of them may share a busy core
HASTY_S = 2.0  # the time-out of a meeting that fails; ranks that should come must come within it
NONCE = "0a" * 32
TCP_REPAIR = 19  # from <linux/tcp.h>


@pytest.fixture(params=["local", "tcp"])
def place(request: pytest.FixtureRequest) -> str:
    return free_place(request.param)


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten rank 0's wait for late ranks, because the ranks of a test come at once."""
    monkeypatch.setattr(rendezvous_server, "_LINGER_S", 0.25)


def free_place(kind: str = "local") -> str:
    if kind == "local":
        return f"@multiring-test-{os.getpid()}-{random.SystemRandom().getrandbits(64):x}"
    return f"127.0.0.1:{free_port()}"


def identity(rank: int, size: int, place: str, **changes: Any) -> Identity:
    plain = Identity(
        rank=rank, size=size, local_rank=None, local_size=None, rendezvous=place, secret=b"s", job="job", source="test"
    )
    return replace(plain, **changes)


Outcome = Any  # the rank's result, or its error


def run_ranks(*ranks: Callable[[], Any]) -> list[Outcome]:
    """Run each callable on its own thread; return each result or error. All must end within the deadline."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures: list[Future[Any]] = [pool.submit(rank) for rank in ranks]
        return [future.exception(DEADLINE_S) or future.result() for future in futures]


def meeting(rank: int, size: int, place: str, *, timeout_s: float = PATIENT_S, **changes: Any) -> Callable[[], Any]:
    version = changes.pop("version", VERSION)

    def run() -> Any:
        who = identity(rank, size, place, **changes)
        return meet(who, {"rank": rank, "pid": [os.getpid()]}, timeout_s=timeout_s, version=version)

    return run


def texts_of(outcomes: list[Outcome]) -> set[str]:
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    return {str(outcome) for outcome in outcomes}


def the_text_of(outcomes: list[Outcome]) -> str:
    """Return the error text of all ranks; fail unless all texts are equal."""
    (text,) = texts_of(outcomes)
    return text


# -- meeting


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_everyone_gets_every_card_in_rank_order(size: int, place: str) -> None:
    outcomes = run_ranks(*[meeting(rank, size, place) for rank in reversed(range(size))])
    assert outcomes == [[{"rank": rank, "pid": [os.getpid()]} for rank in range(size)]] * size


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_rounds_follow_each_other_and_one_failure_ends_them_for_all(place: str, failing: int) -> None:
    def rank(number: int) -> None:
        with Rendezvous(identity(number, 4, place), timeout_s=PATIENT_S) as rendezvous:
            assert [peer_info["n"] for peer_info in rendezvous.exchange({"n": number})] == [0, 1, 2, 3]
            rendezvous.agree(None)
            if number == 1:  # a rank that is busy outside an exchange must detect the failure too
                deadline = time.monotonic() + 240
                while not rendezvous.disturbed():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            rendezvous.agree(f"no memory {number}" if number == failing else None)

    outcomes = run_ranks(*[lambda n=n: rank(n) for n in range(4)])
    assert the_text_of(outcomes) == f"rank {failing}: no memory {failing}"


def test_all_rounds_share_one_time_out(place: str) -> None:
    began = time.monotonic() - 3000

    def rank(number: int) -> tuple[float, float]:
        with Rendezvous(identity(number, 2, place), timeout_s=3600, began=began) as rendezvous:
            rendezvous.exchange({})
            left_s = rendezvous.left_s
            rendezvous.agree(None)
            return left_s, rendezvous.left_s

    for first_s, second_s in run_ranks(*[lambda n=n: rank(n) for n in range(2)]):
        assert 0 < second_s < first_s < 600


def test_ranks_that_have_met_late_have_some_time_to_connect(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_link, "CONNECT_S", 500.0)

    def rank(number: int) -> float:
        began = time.monotonic() - 3500
        with Rendezvous(identity(number, 2, place), timeout_s=3600, began=began) as rendezvous:
            rendezvous.exchange({})
            return rendezvous.left_s

    for left_s in run_ranks(*[lambda n=n: rank(n) for n in range(2)]):
        assert 200 < left_s < 500


def test_the_time_for_finding_the_address_is_part_of_the_time_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class MeetingError(Exception):
        pass

    def meet_not(_identity: Identity, *, timeout_s: float, began: float) -> None:
        raise MeetingError(timeout_s, began)

    def find(*_: object) -> Identity:
        found_at.append(time.monotonic())
        return identity(1, 2, place)

    found_at: list[float] = []
    monkeypatch.setattr(joining, "Rendezvous", meet_not)
    monkeypatch.setattr(joining, "identify", find)
    with pytest.raises(MeetingError) as raised:
        joining.join_job(Settings.from_environment({"MULTIRING_INIT_TIMEOUT_S": "7"}), None)
    timeout_s, began = raised.value.args
    assert timeout_s == 7
    assert began <= found_at[0]


def test_a_process_with_more_than_a_thousand_descriptors_meets(place: str) -> None:
    def rank(number: int) -> None:
        with Rendezvous(identity(number, 2, place), timeout_s=PATIENT_S) as rendezvous:
            rendezvous.exchange({"n": number})
            assert not rendezvous.disturbed()
            rendezvous.agree(None)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    held = [os.dup(0) for _ in range(1100)]
    try:
        assert run_ranks(*[lambda n=n: rank(n) for n in range(2)]) == [None, None]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_one_address_serves_one_meeting_after_the_other(place: str) -> None:
    def rank(number: int) -> list[Any]:
        return [meeting(number, 3, place)() for _ in range(30)]

    outcomes = run_ranks(*[lambda n=n: rank(n) for n in range(3)])
    assert all(isinstance(outcome, list) and len(outcome) == 30 for outcome in outcomes), outcomes


@pytest.mark.skipif(os.geteuid() != 0, reason="to forget a connection without a word takes root")
def test_a_connection_whose_other_end_is_gone_is_given_up() -> None:
    """The kernel sometimes leaves such a connection when a client connects while the listener closes."""
    place = free_place("tcp")
    with listen(parse_address(place)) as listener, ThreadPoolExecutor(2) as pool:
        one = pool.submit(meeting(1, 2, place, timeout_s=PATIENT_S))
        listener.settimeout(DEADLINE_S)
        forgotten, _ = listener.accept()
        forgotten.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        forgotten.close()  # silently: neither FIN nor RST is sent
        listener.close()
        zero = pool.submit(meeting(0, 2, place, timeout_s=PATIENT_S))
        assert len(zero.result(DEADLINE_S)) == len(one.result(DEADLINE_S)) == 2


def test_rank_0_may_come_last(place: str) -> None:
    def late() -> Any:
        time.sleep(0.3)
        return meeting(0, 2, place)()

    assert all(isinstance(outcome, list) for outcome in run_ranks(late, meeting(1, 2, place)))


def test_a_listener_that_is_already_there_is_used_and_closed() -> None:
    with listen(parse_address("@" + free_place()[1:])) as listener:
        place = free_place("tcp")
        given = listen(parse_address(place))
        first = meeting(0, 2, place, listener=given)
        assert all(isinstance(outcome, list) for outcome in run_ranks(first, meeting(1, 2, place)))
        assert given.fileno() == -1
        assert listener.fileno() != -1


def test_a_card_may_be_large(place: str) -> None:
    def rank(number: int) -> list[int]:
        with Rendezvous(identity(number, 4, place), timeout_s=PATIENT_S) as rendezvous:
            return [len(peer_info["x"]) for peer_info in rendezvous.exchange({"x": "y" * 900_000})]

    assert run_ranks(*[lambda n=n: rank(n) for n in range(4)]) == [[900_000] * 4] * 4


# -- mistakes, and the ranks that get the error


def test_a_missing_rank_is_named_on_every_rank_that_came(place: str) -> None:
    outcomes = run_ranks(*[meeting(rank, 5, place, timeout_s=HASTY_S) for rank in (0, 1, 4)])
    text = the_text_of(outcomes)
    assert f"ranks 2, 3 did not arrive at {place} within 2 s (3 of 5 did)" in text


def test_rank_0_judges_who_is_late(place: str) -> None:
    patient, hasty = meeting(0, 3, place, timeout_s=2 * HASTY_S), meeting(1, 3, place, timeout_s=HASTY_S)
    text = the_text_of(run_ranks(patient, hasty))
    assert "rank 2 did not arrive" in text


def test_rank_0_never_appears(place: str) -> None:
    (outcome,) = run_ranks(meeting(1, 2, place, timeout_s=0.3))
    assert f"rank 1 found no rank 0 at {place} within 0.3 s (last attempt: Connection refused)" in str(outcome)


def test_a_wrong_secret_is_refused_and_the_job_goes_on(place: str) -> None:
    stranger = threading.Event()
    outcomes: list[Outcome] = []

    def wrong() -> None:
        outcomes.extend(run_ranks(meeting(1, 2, place, secret=b"guess")))
        stranger.set()

    def right() -> Any:
        assert stranger.wait(DEADLINE_S)
        return meeting(1, 2, place)()

    first, _, second = run_ranks(meeting(0, 2, place), wrong, right)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert f"{place} refused rank 1: wrong secret" in the_text_of(outcomes)


def test_a_rank_with_a_wrong_secret_is_missing_and_rank_0_says_who_was_refused(place: str) -> None:
    outcomes = run_ranks(meeting(0, 2, place, timeout_s=HASTY_S), meeting(1, 2, place, secret=b"guess"))
    told, refused = map(str, outcomes)
    assert "rank 1 did not arrive" in told
    assert "refused meanwhile" in told
    assert "wrong secret (it says it is rank 1)" in told
    assert "wrong secret" in refused


def test_another_jobs_rank_is_refused_and_the_job_goes_on(place: str) -> None:
    outcomes = run_ranks(meeting(0, 2, place, timeout_s=HASTY_S), meeting(1, 2, place, job="other"))
    assert "rank 1 did not arrive" in str(outcomes[0])
    assert str(outcomes[1]) == "this is job 'job', but the process belongs to job 'other'"


def test_different_versions_are_listed_on_every_rank(place: str) -> None:
    versions = ["1.0", "1.0", "1.1", "2.0"]
    outcomes = run_ranks(*[meeting(rank, 4, place, version=version) for rank, version in enumerate(versions)])
    text = the_text_of(outcomes)
    assert "1.0 on ranks 0, 1; 1.1 on rank 2; 2.0 on rank 3; install one version everywhere" in text


def test_different_sizes_are_told_to_every_rank(place: str) -> None:
    text = the_text_of(run_ranks(meeting(0, 3, place), meeting(1, 3, place), meeting(2, 4, place)))
    assert "rank 2 (pid " in text
    assert "was started for 4 ranks, but rank 0 for 3" in text


def test_a_rank_out_of_range_is_told_to_every_rank(place: str) -> None:
    def outside() -> Any:
        who = identity(1, 2, place)
        object.__setattr__(who, "rank", 9)  # the constructor of Identity rejects this rank
        return meet(who, {}, timeout_s=PATIENT_S)

    text = the_text_of(run_ranks(meeting(0, 2, place), outside))
    assert "was started as rank 9: want 0 to 1" in text


def test_a_rank_that_comes_twice_is_told_to_every_rank(place: str) -> None:
    text = the_text_of(run_ranks(meeting(0, 3, place), meeting(1, 3, place), meeting(1, 3, place)))
    assert text.startswith("two processes are rank 1: pid ")


def test_who_comes_after_the_job_is_complete_is_refused_and_harms_nobody(place: str) -> None:
    complete, refused = threading.Event(), threading.Event()

    def rank(number: int) -> None:
        with Rendezvous(identity(number, 2, place), timeout_s=PATIENT_S) as rendezvous:
            rendezvous.exchange({})
            complete.set()
            if number == 1:
                assert refused.wait(DEADLINE_S)  # rank 0 keeps serving during this time
            rendezvous.agree(None)

    def late() -> Any:
        assert complete.wait(DEADLINE_S)
        try:
            return meeting(1, 2, place)()
        finally:
            refused.set()

    first, second, third = run_ranks(lambda: rank(0), lambda: rank(1), late)
    assert (first, second) == (None, None)
    assert "the job is complete; rank 1 is pid " in str(third)


# -- ranks that end or fail on the way


def test_a_rank_that_raises_between_rounds_is_told_to_every_rank(place: str) -> None:
    def rank(number: int, culprit: int) -> None:
        with Rendezvous(identity(number, 3, place), timeout_s=PATIENT_S) as rendezvous:
            rendezvous.exchange({})
            if number == culprit:
                raise ValueError("no such thing")
            rendezvous.exchange({})

    for culprit in (0, 2):
        outcomes = run_ranks(*[lambda n=n, c=culprit: rank(n, c) for n in range(3)])
        assert isinstance(outcomes.pop(culprit), ValueError)
        text = the_text_of(outcomes)
        assert text.startswith(f"rank {culprit} ")
        assert text.endswith("failed during init: ValueError: no such thing")


def test_a_rank_that_raises_before_the_first_round_leaves_quietly(place: str) -> None:
    def fails() -> None:
        with Rendezvous(identity(1, 2, place), timeout_s=PATIENT_S):
            raise ValueError("early")

    outcomes = run_ranks(meeting(0, 2, place, timeout_s=HASTY_S), fails)
    assert "rank 1 did not arrive" in str(outcomes[0])
    assert isinstance(outcomes[1], ValueError)


def test_rank_0_that_raises_early_tells_those_who_still_come(place: str) -> None:
    def fails() -> None:
        with Rendezvous(identity(0, 2, place), timeout_s=PATIENT_S):
            raise ValueError("early")

    outcomes = run_ranks(fails, meeting(1, 2, place))
    assert str(outcomes[1]) == "rank 0 failed during init: ValueError: early"


RANK_PROCESS = """
import json, sys
from multiring._runtime.bootstrap import rendezvous_client
from multiring._runtime.bootstrap.rendezvous import meet
from multiring._runtime.bootstrap.identity import Identity
join = rendezvous_client.Client._join
def tells(self, talk):
    limit = join(self, talk)
    print("joined", flush=True)
    return limit
rendezvous_client.Client._join = tells
rank, size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
who = Identity(rank=rank, size=size, local_rank=None, local_size=None, rendezvous=place, secret=b"s", job="job",
               source="test")
print("up", flush=True)
meet(who, {}, timeout_s=100)
"""


@pytest.fixture
def rank_process() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, size: int, place: str, prefix: str = "") -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", prefix + RANK_PROCESS, str(rank), str(size), place]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_that_dies_while_others_wait_is_named_at_once(
    place: str, rank_process: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    victim = rank_process(2, 4, place)

    def kill_once_it_has_joined() -> None:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"joined\n"
        victim.kill()

    begin = time.monotonic()
    outcomes = run_ranks(meeting(0, 4, place), meeting(1, 4, place), kill_once_it_has_joined)
    text = the_text_of(outcomes[:2])
    assert f"rank 2 (pid {victim.pid} on " in text
    assert "was lost during init: its connection closed" in text
    assert time.monotonic() - begin < PATIENT_S


def test_rank_0_that_dies_is_noticed_at_once(
    place: str, rank_process: Callable[..., "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = rank_process(0, 4, place)
    joined, join = threading.Semaphore(0), Client._join

    def tells(client: Client, talk: Any) -> TimeLimit:
        limit = join(client, talk)
        joined.release()
        return limit

    def kill_once_both_have_joined() -> None:
        for _ in range(2):
            assert joined.acquire(timeout=DEADLINE_S)
        victim.kill()

    monkeypatch.setattr(Client, "_join", tells)
    begin = time.monotonic()
    outcomes = run_ranks(meeting(1, 4, place), meeting(2, 4, place), kill_once_both_have_joined)
    assert the_text_of(outcomes[:2]) == "rank 0 was lost during init: its connection closed"
    assert time.monotonic() - begin < PATIENT_S


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_waiting(rank: int, place: str, rank_process: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    process = rank_process(rank, 2, place)
    time.sleep(0.25)  # the rank may wait by now; the test passes at any moment
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert b"KeyboardInterrupt" in err
    assert process.returncode == -signal.SIGINT


# -- clients without the secret


def dial(place: str) -> socket.socket:
    """Connect as soon as rank 0 listens."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        sock = socket.socket(socket.AF_UNIX if place.startswith("@") else socket.AF_INET)
        sock.settimeout(DEADLINE_S)
        host, _, port = place.rpartition(":")
        try:
            sock.connect((host, int(port)) if port.isdecimal() else "\0" + place[1:])
        except (ConnectionRefusedError, BlockingIOError):
            sock.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return sock


def everything_from(sock: socket.socket) -> bytes:
    data = b""
    try:
        while more := sock.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


def meets_in_spite_of(place: str, *strangers: Callable[[], None]) -> None:
    """Let unauthenticated clients come and go while rank 0 waits; then ranks 0 and 1 must still meet."""
    calm = threading.Event()

    def all_strangers() -> None:
        try:
            for stranger in strangers:
                stranger()
        finally:
            calm.set()

    def second() -> Any:
        assert calm.wait(DEADLINE_S)
        return meeting(1, 2, place)()

    outcomes = run_ranks(meeting(0, 2, place, timeout_s=DEADLINE_S), second, all_strangers)
    assert [type(outcome) for outcome in outcomes] == [list, list, type(None)], outcomes


def test_garbage_is_refused_and_the_job_unharmed(place: str) -> None:
    noise = random.Random(7)  # noqa: S311 -- noise, not secrets

    def garbage() -> None:
        for _ in range(300):
            with dial(place) as sock:
                try:
                    sock.sendall(noise.randbytes(noise.randrange(200)))
                    if noise.random() < 0.3:
                        sock.shutdown(socket.SHUT_WR)
                except (BrokenPipeError, ConnectionResetError):
                    pass

    meets_in_spite_of(place, garbage)


def test_truncated_and_misshapen_frames_are_refused_with_a_reason(place: str) -> None:
    frames = [
        frame(b"not json"),
        frame(b"[]"),
        frame(encode({"nonce": 1, "rank": 0, "proof": "x"})),
        frame(encode({"nonce": "x", "rank": "x", "proof": "x"})),
        frame(encode({"nonce": "x", "rank": 1, "proof": "x"})),
        frame(encode({"nonce": NONCE, "rank": 1, "proof": 5})),
        frame(encode({"nonce": NONCE, "rank": True, "proof": "x"})),
        frame(encode({"nonce": NONCE, "rank": 10**4000, "proof": "x"})),
        frame(encode({"nonce": "\ud800", "rank": 1, "proof": "x"})),
        frame(encode({"nonce": NONCE, "rank": 1, "proof": "\ud800"})),
        frame('{"nonce": 1}'.encode("utf-16")),
        frame(b"x" * 5000),
        b"GET / HTTP/1.0\r\n\r\n",
    ]

    def misshapen() -> None:
        for sent in frames:
            with dial(place) as sock:
                sock.sendall(sent)
                assert b'{"refused":' in everything_from(sock), sent
        for sent in frames[:3]:
            with dial(place) as sock:
                sock.sendall(sent[:-1])  # the last byte is never sent

    meets_in_spite_of(place, misshapen)


def test_silent_connections_do_not_keep_ranks_out(place: str) -> None:
    opened: list[socket.socket] = []

    def slow_loris() -> None:
        opened.extend(dial(place) for _ in range(rendezvous_server._MAX_PENDING_HANDSHAKES + 20))

    try:
        meets_in_spite_of(place, slow_loris)
        assert len(opened) == rendezvous_server._MAX_PENDING_HANDSHAKES + 20
    finally:
        for sock in opened:
            sock.close()


def test_strangers_do_not_take_the_place_of_a_rank_that_has_proven_itself(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_server, "_YOUNG_S", 0.0)  # accept unauthenticated clients at once
    opened: list[socket.socket] = []

    def second() -> Any:
        client = Client(identity(1, 2, place), parse_address(place), VERSION, TimeLimit(DEADLINE_S))
        try:
            client._talk = client._find()
            opened.extend(dial(place) for _ in range(rendezvous_server._MAX_PENDING_HANDSHAKES + 50))
            assert opened[-1].recv(1)  # all of the clients have been accepted
            client.limit = client._join(client._talk)
            return client.exchange({})
        finally:
            client.close()

    try:
        outcomes = run_ranks(meeting(0, 2, place, timeout_s=DEADLINE_S), second)
        assert [type(outcome) for outcome in outcomes] == [list, list], outcomes
    finally:
        for sock in opened:
            sock.close()


def test_a_silent_connection_is_closed_after_a_while(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "_HANDSHAKE_S", 0.2)

    def silent() -> None:
        with dial(place) as sock:
            assert b"did not join within 0.2 s" in everything_from(sock)
        monkeypatch.setattr(rendezvous_server, "_HANDSHAKE_S", DEADLINE_S)  # of the rank that comes now

    meets_in_spite_of(place, silent)


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = free_place()
    other = PeerCredentials(1, os.getuid() + 1, 0)
    monkeypatch.setattr(rendezvous_server, "peer_credentials", lambda _: other)
    outcomes = run_ranks(meeting(0, 2, place, timeout_s=HASTY_S), meeting(1, 2, place))
    assert "it runs as another user" in str(outcomes[0])
    assert f"but this job runs as uid {os.getuid()}" in str(outcomes[1])


def test_an_address_held_by_another_user_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = free_place()
    other = PeerCredentials(1, os.getuid() + 1, 0)
    monkeypatch.setattr(rendezvous_client, "peer_credentials", lambda _: other)
    with Rendezvous(identity(0, 2, place), timeout_s=PATIENT_S):
        (outcome,) = run_ranks(meeting(1, 2, place))
    assert f"{place} is held by uid {os.getuid() + 1}" in str(outcome)


SMALL = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"


def test_a_soft_limit_of_open_files_is_raised(
    place: str, rank_process: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    soft = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 4096))\n"
    first = rank_process(0, 33, place, soft)
    outcomes = run_ranks(*[meeting(rank, 33, place) for rank in range(1, 33)])
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    assert first.wait(DEADLINE_S) == 0


HUNGRY = """
import atexit, resource
import multiring._runtime.bootstrap.rendezvous
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True))
"""


def test_rank_0_holds_its_table_once_however_many_ranks_are_slow_to_take_it(
    rank_process: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    """The slow ranks do not parse their tables, so that one process can play many ranks."""
    place, size = free_place(), 256
    peer_info = {"x": "y" * 8000}
    table_bytes = (size - 1) * len(encode(peer_info))
    first = rank_process(0, size, place, HUNGRY)
    crowd = Crowd(place, range(1, size), size, secret=b"s", job="job")
    try:
        crowd.join(DEADLINE_S)
        crowd.say({"peer_info": peer_info})
        time.sleep(0.5)  # rank 0 has sent what fits into the kernel's buffers
        assert crowd.take_tables(DEADLINE_S) >= table_bytes
    finally:
        crowd.close()
    out, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0
    assert int(out) * 1024 < 64 * 2**20 < size * table_bytes / 4, out


def test_strangers_cannot_use_up_rank_0s_descriptors(
    place: str, rank_process: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    first = rank_process(0, 2, place, SMALL)
    silent = [dial(place) for _ in range(30)]
    try:
        assert isinstance(run_ranks(meeting(1, 2, place))[0], list)
        assert first.wait(DEADLINE_S) == 0
    finally:
        for sock in silent:
            sock.close()


def test_more_ranks_than_descriptors_is_an_error_that_says_so(
    rank_process: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    place = free_place()
    rank_process(0, 20, place, SMALL)
    outcomes = run_ranks(*[meeting(rank, 20, place, timeout_s=2 * HASTY_S) for rank in range(1, 20)])
    assert any("rank 0 cannot hold more connections" in text and "ulimit -n" in text for text in texts_of(outcomes))


def test_a_rank_says_that_rank_0s_place_is_reached_and_does_not_answer(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting_lines, "_EVERY_S", 1.0)
    with listen(parse_address(place)):  # the listener never answers, like a stopped process or another program
        (text,) = texts_of(run_ranks(meeting(1, 2, place, timeout_s=3.5)))
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) in (1, 2, 3)
    assert all(f"rank 1 found no rank 0 at {place} yet (last attempt: connected, but no" in line for line in lines)
    assert f"found no rank 0 at {place} within 3.5 s (last attempt: connected, but no answer came)" in text


@pytest.mark.parametrize("given", [b"", b"s"])
def test_every_rank_has_the_secret(given: bytes) -> None:
    place = free_place()

    def rank(number: int) -> bytes:
        with Rendezvous(identity(number, 3, place, secret=given), timeout_s=PATIENT_S) as rendezvous:
            secret = rendezvous.secret()
            rendezvous.exchange({})
            return secret

    (secret,) = set(run_ranks(*[lambda n=n: rank(n) for n in range(3)]))
    assert secret == given or (not given and len(secret) == 32)


def test_nobody_listens_on_a_network_without_a_secret() -> None:
    with pytest.raises(ArgumentError, match="without a secret: anybody could join"):
        meeting(0, 2, free_place("tcp"), secret=b"")()


# -- another program listens at rank 0's address


@pytest.fixture
def impostor() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Yield a function that starts a server with a given behaviour and returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)

        def start(behave: Callable[[socket.socket], None]) -> str:
            def serve() -> None:
                sock, _ = listener.accept()
                with sock:
                    behave(sock)
                    everything_from(sock)

            threading.Thread(target=serve, daemon=True).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


def test_a_server_of_another_kind_is_named(impostor: Callable[..., str]) -> None:
    greetings: list[dict[str, Any]] = [
        {"hello": "another", "nonce": NONCE},
        {"hello": PROTOCOL, "nonce": "\ud800"},
        {"refused": {"\ud800": 1}},
    ]
    for greeting in (b"SSH-2.0-OpenSSH_9.6\r\n", *(frame(encode(each)) for each in greetings)):
        place = impostor(lambda sock, greeting=greeting: sock.sendall(greeting))
        (outcome,) = run_ranks(meeting(1, 2, place))
        assert f"{place} does not speak {PROTOCOL!r}" in str(outcome)
        assert str(outcome).isascii()


def test_a_server_without_the_secret_is_not_believed(impostor: Callable[..., str]) -> None:
    def pretend(sock: socket.socket) -> None:
        sock.sendall(frame(encode({"hello": PROTOCOL, "nonce": NONCE})))
        reader = FrameReader(4096)
        while (mine := reader.next_frame()) is None:
            reader.feed(sock.recv(4096))
        sock.sendall(frame(encode({"proof": json.loads(mine)["proof"]})))  # reflects the client's own proof

    (outcome,) = run_ranks(meeting(1, 2, impostor(pretend)))
    assert "does not know the job's secret" in str(outcome)


def test_a_silent_server_is_given_up_at_the_time_out(impostor: Callable[..., str]) -> None:
    (outcome,) = run_ranks(meeting(1, 2, impostor(lambda _: None), timeout_s=HASTY_S))
    assert "rank 1 found no rank 0" in str(outcome)
    assert "connected, but no answer came" in str(outcome)


def test_a_connection_that_closes_early_is_tried_again(impostor: Callable[..., str]) -> None:
    place = impostor(lambda sock: sock.shutdown(socket.SHUT_WR))
    (outcome,) = run_ranks(meeting(1, 2, place, timeout_s=0.3))
    assert "rank 1 found no rank 0" in str(outcome)


def test_rank_0_cannot_listen(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(rendezvous_server, "_ADDRESS_TAKEN_S", 0.1)
    with listen(parse_address(place)), pytest.raises(RendezvousError, match=r"cannot listen at .*another process does"):
        meeting(0, 2, place)()
    with pytest.raises(RendezvousError, match=r"cannot listen at 192\.0\.2\.1:5000: Cannot assign"):
        meeting(0, 2, "192.0.2.1:5000")()
    with pytest.raises(ArgumentError, match="want host:port"):
        meeting(0, 2, "nowhere")()


# -- authenticated peers that break the protocol or stall


def test_a_rank_that_breaks_the_protocol_ends_the_job(place: str) -> None:
    def broken(second_message: dict[str, Any]) -> Any:
        client = Client(identity(1, 2, place), parse_address(place), VERSION, TimeLimit(PATIENT_S))
        try:
            talk = client._find()
            client._join(talk)
            talk.say(second_message)
            return talk.hear()
        finally:
            client.close()
            talk.line.sock.close()

    for wrong in ("cord", "peer_info"):
        outcomes = run_ranks(meeting(0, 2, place), partial(broken, {wrong: 7}))
        assert "it broke the protocol: an unexpected message" in str(outcomes[0])


def test_a_rank_0_that_breaks_the_protocol_is_named(place: str) -> None:
    def first(harm: Callable[[Any], None]) -> None:
        with Rendezvous(identity(0, 2, place), timeout_s=PATIENT_S) as rendezvous:
            rendezvous.exchange({})
            harm(rendezvous._end)
            time.sleep(0.2)

    def second() -> None:
        with Rendezvous(identity(1, 2, place), timeout_s=PATIENT_S) as rendezvous:
            rendezvous.exchange({})
            rendezvous.exchange({})

    def forge(server: Any) -> None:
        server._members[1].sock.send(frame(b"x" * 40))

    outcomes = run_ranks(lambda: first(forge), second)
    assert "rank 0 broke the protocol during init: a frame's seal is wrong" in str(outcomes[1])


def test_a_rank_0_that_falls_silent_is_given_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_client, "_GRACE_S", 0.2)
    over = threading.Event()

    def first() -> None:
        with Rendezvous(identity(0, 2, place), timeout_s=HASTY_S) as rendezvous:
            rendezvous.exchange({})
            assert over.wait(DEADLINE_S)

    def second() -> None:
        with Rendezvous(identity(1, 2, place), timeout_s=HASTY_S) as rendezvous:
            rendezvous.exchange({})
            try:
                rendezvous.exchange({})
            finally:
                over.set()

    outcomes = run_ranks(first, second)
    assert f"rank 0 at {place} stopped answering during init" in str(outcomes[1])


def test_a_rank_that_does_not_answer_in_a_later_round_is_named(place: str) -> None:
    over = threading.Event()

    def rank(number: int) -> None:
        with Rendezvous(identity(number, 3, place), timeout_s=HASTY_S) as rendezvous:
            rendezvous.exchange({})
            if number == 2:
                assert over.wait(DEADLINE_S)
                return
            try:
                rendezvous.exchange({})
            finally:
                over.set()

    outcomes = run_ranks(*[lambda n=n: rank(n) for n in range(3)])
    assert "rank 2 did not answer at" in the_text_of(outcomes[:2])


def test_a_rank_that_does_not_read_its_answer_is_named() -> None:
    place = free_place()
    over = threading.Event()

    def first() -> Any:
        try:
            with Rendezvous(identity(0, 3, place), timeout_s=HASTY_S) as rendezvous:
                return rendezvous.exchange({"x": "y" * 900_000})
        finally:
            over.set()

    def deaf() -> None:
        client = Client(identity(1, 3, place), parse_address(place), VERSION, TimeLimit(PATIENT_S))
        talk = client._find()
        client._join(talk)
        talk.say({"peer_info": {"x": "y" * 900_000}})
        assert over.wait(DEADLINE_S)
        talk.line.sock.close()

    outcomes = run_ranks(first, deaf, meeting(2, 3, place))
    assert "rank 1 did not take the answer within 2 s" in str(outcomes[0])

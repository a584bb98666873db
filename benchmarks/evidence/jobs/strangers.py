"""Attack a job from outside: fuzzed messages, occupied ports, a full rendezvous.

    python benchmarks/evidence/jobs/strangers.py [--only parsers,ports] [--short]

The program takes under half an hour. In addition to the tests' requirements, it needs GCC's sanitizers.
"""

import random
import resource
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' strangers

from benchmarks.evidence.jobs.job import ROOT, Job
from benchmarks.evidence.support.claims import Claim, report
from tests.support.crowd import Crowd
from tests.support.strangers import visit
from tests.wire.test_strangers_words import TO_A_RANK, TO_RANK_0, Door, hear_an_impostor, words

from multiring._runtime.bootstrap.handshake import encode, frame, new_nonce
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous import meet
from multiring._settings import environment_of, inherited_environment

INPUTS, AT_A_PORT = 1_000_000, 10_000
NATIVE_INPUTS_A_SCALE = 25_000
A_TURN = 10  # the number of inputs in one hypothesis example
LIGHT, RANK_0_BYTES, MEET_S = 2048, 256 << 20, 20.0
HELD = 300
AT_A_TIME = 50
SECRET = "of the evidence"  # noqa: S105 -- of jobs that live for seconds


def parsers(share: int) -> Iterator[Claim]:
    """Fuzz the parsers: in C++ under ASan and UBSan, in Python with hypothesis."""
    start = time.monotonic()
    heard, limit = 0, INPUTS // 20 // share
    door = Door()

    @settings(max_examples=limit // A_TURN // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(words(TO_RANK_0), min_size=A_TURN, max_size=A_TURN))
    def strangers_come(said: list[bytes]) -> None:
        nonlocal heard
        for each in said:
            door.hear(each)
        heard += len(said)

    @settings(max_examples=limit // A_TURN // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(words(TO_A_RANK), min_size=A_TURN, max_size=A_TURN))
    def an_impostor_waits(said: list[bytes]) -> None:
        nonlocal heard
        for each in said:
            hear_an_impostor(each)
        heard += len(said)

    fault = ""
    try:
        strangers_come()
        an_impostor_waits()
    except BaseException as error:  # noqa: BLE001 -- any error is the finding
        fault = f"{type(error).__name__}: {error}"
    finally:
        door.server.close()
    yield Claim(
        text=f"{heard:,} structured words of strangers and impostors at the rendezvous, in process: refused",
        figure=fault or f"all refused in {time.monotonic() - start:.0f} s",
        holds=not fault,
    )
    start = time.monotonic()
    make = subprocess.run(["make", "build/asan/build.ninja"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    build = ["cmake", "--build", "build/asan", "--target", "handshakes_test"]
    built = make.returncode or subprocess.run(build, cwd=ROOT, capture_output=True, check=False).returncode  # noqa: S603
    built_s = time.monotonic() - start
    scale = max(1, (INPUTS - heard) // NATIVE_INPUTS_A_SCALE // share)
    command = [
        str(ROOT / "build/asan/native/handshakes_test"),
        str(scale),
        str(random.SystemRandom().randrange(1 << 32)),
    ]
    fuzz = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    fuzz_s = time.monotonic() - start - built_s
    inputs = next((int(line.split()[0]) for line in fuzz.stdout.splitlines() if line.endswith(" inputs")), 0)
    yield Claim(
        text=f"{INPUTS // share:,} inputs in all: the rest into handshakes, frames and bells, under ASan and UBSan",
        figure=f"{inputs:,} in {fuzz_s:.0f} s, seed {command[2]}, exit code {fuzz.returncode}"
        + ("" if fuzz.returncode == 0 and not built else f"<br>{(fuzz.stdout + fuzz.stderr)[-2000:]}"),
        holds=not built and fuzz.returncode == 0 and inputs + heard >= INPUTS // share,
    )


def ports(share: int) -> Iterator[Claim]:
    """Send fuzzed frames to a waiting rendezvous and to the ports of a running job.

    The rendezvous waits for its last rank.
    """
    count = AT_A_PORT // share
    for place in (f"@multiring-evidence-{secrets.token_hex(8)}", f"127.0.0.1:{_free_port()}"):
        start = time.monotonic()
        ranks = [_rank(rank, place) for rank in (0, 1)]
        said = list(_rendezvous_words(random.Random(share), count))  # noqa: S311 -- noise
        answers = [
            each for at in range(0, count, AT_A_TIME) for each in _visit_rendezvous(place, said[at : at + AT_A_TIME])
        ]
        let_in = sum(b'"proof"' in answer for answer in answers)
        ranks.append(_rank(2, place))
        codes = [rank.wait(60) for rank in ranks]
        yield Claim(
            text=f"{count:,} structured words at the rendezvous {'(tcp)' if ':' in place else '(abstract socket)'}",
            figure=f"{let_in} let in, in {time.monotonic() - start:.0f} s; the job's exit codes {codes}",
            holds=let_in == 0 and codes == [0, 0, 0],
        )
    with Job(3, "open", multiring_engine="tcp") as job:
        job.wait_for(lambda heard: len(heard) == 3, 60)
        listening = sorted(word["port"] for word in job.heard)
        start = time.monotonic()
        got_through = sum(visit(port, count, seed) for seed, port in enumerate(listening))
        seconds = time.monotonic() - start
        job.tell("stop")
        job.wait_for(lambda heard: len(heard) == 6, 60)
        code = job.launcher.wait(30)
    done = [word for word in job.heard if "turns" in word]
    yield Claim(
        text=f"{count:,} frames at each of 3 ranks' ports: refused, the job unharmed and right",
        figure=f"{got_through} got through in {seconds:.0f} s, {2 * done[0]['turns']} sums meanwhile, exit code {code}",
        holds=got_through == 0 and code == 0 and all(word["right"] for word in done),
    )


def doors(share: int) -> Iterator[Claim]:
    """Hold silent connections at every rank's port while the ranks connect."""
    hosts, slots = (8, 8) if share == 1 else (4, 2)
    with Job(hosts * slots, "crowded", hosts, HELD, multiring_init_timeout_s=300) as job:
        job.wait_for(lambda heard: len(heard) == hosts * slots, 500)
        code = job.launcher.wait(60)
    links_s = max(word["links_s"] for word in job.heard)
    came = min(word["came"] for word in job.heard)
    yield Claim(
        text=f"{HELD} unproven connections held at every rank's port while {hosts * slots} ranks on {hosts} virtual "
        "hosts make all their links: nobody lost",
        figure=f"all links within {links_s:.1f} s, at least {came} came to each port, exit code {code}",
        holds=code == 0 and all(word["right"] for word in job.heard) and came >= HELD,
    )


def thousands(share: int) -> Iterator[Claim]:
    """Start a rendezvous with thousands of light clients, which are bare sockets."""
    size = LIGHT // share + 1
    place = f"@multiring-evidence-{secrets.token_hex(8)}"
    mine, theirs = get_context("spawn").Pipe()
    first = get_context("spawn").Process(target=_rank_0, args=(theirs, place, size))
    first.start()
    _allow_files(size + 100)
    crowd = Crowd(place, range(1, size), size, secret=b"s", job="job")
    try:
        crowd.join(120)
        arrived = time.monotonic()
        crowd.say({"peer_info": _peer_info()})
        table_bytes = crowd.take_tables(120)
        seconds = time.monotonic() - arrived
    finally:
        crowd.close()
    grown: int = mine.recv()
    first.join(60)
    yield Claim(
        text=f"rendezvous with {size - 1:,} light clients: {MEET_S:g} s from the last arrival, "
        f"rank 0 under {RANK_0_BYTES >> 20} MiB above its imports",
        figure=f"{seconds:.1f} s for a table of {table_bytes / 2**20:.2f} MiB, {grown / 2**20:.0f} MiB",
        holds=seconds <= MEET_S and grown < RANK_0_BYTES,
    )


def _rank_0(report_to: Connection, place: str, size: int) -> None:
    before = _peak_bytes()
    meet(_identity(0, size, place), _peer_info(), timeout_s=120)
    report_to.send(_peak_bytes() - before)


def _peer_info() -> dict[str, object]:
    # as large as the information that `init` sends from a host with 64 cores
    return {"host": "h" * 90, "name": "n" * 20, "handover": "m" * 42, "cores": list(range(64)), "rest": "r" * 200}


def _identity(rank: int, size: int, place: str) -> Identity:
    return Identity(
        rank=rank,
        size=size,
        local_rank=None,
        local_size=None,
        rendezvous=place,
        secret=b"s",
        job="job",
        source="evidence",
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _rank(rank: int, place: str) -> "subprocess.Popen[bytes]":
    said = environment_of(rank=rank, size=3, rendezvous=place, secret=SECRET, job="visited", init_timeout_s=600)
    program = (
        "import multiring, numpy as np; x = np.ones(9); g = multiring.init(); g.all_reduce(x); assert (x == 3).all()"
    )
    return subprocess.Popen([sys.executable, "-c", program], env={**inherited_environment(), **said})  # noqa: S603


def _rendezvous_words(noise: random.Random, count: int) -> Iterator[bytes]:
    """Yield nearly valid frames and noise.

    The frames have a wrong field, a wrong length, or a missing end.
    """
    odd: list[object] = [
        None,
        True,
        -1,
        2**31,
        10**300,
        1.5,
        "",
        "x",
        "\ud800",
        "0" * 64,
        [],
        {},
        [[]] * 9,
        {"\ud800": 1},
    ]
    for _ in range(count):
        message: dict[str, object] = {
            "nonce": new_nonce(),
            "rank": noise.randrange(3),
            "proof": noise.randbytes(32).hex(),
        }
        for name in noise.sample([*message, "hello", "peer_info", "\udfff"], noise.randrange(4)):
            message[name] = noise.choice(odd)
        said = frame(encode(message))
        kind = noise.randrange(6)
        if kind == 0:
            said = said[: noise.randrange(len(said))]
        elif kind == 1:
            said = struct.pack(">I", noise.choice([0, 1, 4095, 4096, 4097, 2**32 - 1])) + said[4:]
        elif kind == 2:
            said = noise.randbytes(noise.randrange(200))
        yield said * noise.choice([1, 1, 1, 2])


def _visit_rendezvous(place: str, said: list[bytes]) -> list[bytes]:
    """Send each text on its own connection, all at the same time; return the answers."""
    lines = [_connected(place) for _ in said]
    for line, each in zip(lines, said, strict=True):
        with suppress(OSError):
            line.sendall(each)
            line.shutdown(socket.SHUT_WR)
    answers = []
    for line in lines:
        answer = b""
        with line, suppress(ConnectionError):
            while more := line.recv(1 << 16):
                answer += more
        answers.append(answer)
    return answers


def _connected(place: str) -> socket.socket:
    """Return a connection to the listener at `place`, waiting until it listens."""
    deadline = time.monotonic() + 60
    host, _, port = place.rpartition(":")
    while True:
        line = socket.socket(socket.AF_UNIX if place.startswith("@") else socket.AF_INET)
        line.settimeout(30)
        try:
            line.connect("\0" + place[1:] if place.startswith("@") else (host, int(port)))
        except (ConnectionRefusedError, BlockingIOError):
            line.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return line


CLAIMS: dict[str, Callable[[int], Iterator[Claim]]] = {
    "thousands": thousands,
    "ports": ports,
    "doors": doors,
    "parsers": parsers,
}


if __name__ == "__main__":
    raise SystemExit(report(CLAIMS, __doc__ or ""))

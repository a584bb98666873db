"""Kinds of launch mistakes, each over a wide range: mixed streams of ranks, settings, --env, closed streams."""

import math
import random
import subprocess
import sys
from dataclasses import fields
from itertools import chain, product

import pytest

from multiring._launch.commands import refuse_places
from multiring._launch.host_output import HostTagger
from multiring._launch.rank_starts import HostPlace, torch_environment
from multiring._runtime.rails.reach import refuse_shared_addresses
from multiring._runtime.rails.select import RailEndpoint
from multiring._settings import Settings, environment_of
from multiring.errors import ArgumentError

DRAW = random.Random(95)  # noqa: S311 -- the same cases each time


# -- one stream of several ranks


def pieces_of(text: bytes) -> list[bytes]:
    cuts = sorted(DRAW.sample(range(len(text) + 1), min(len(text), DRAW.randint(0, 4))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


@pytest.mark.parametrize("case", range(60))
def test_what_ranks_wrote_is_put_together_however_it_was_cut(case: int) -> None:
    """Hydra marks each piece and each line; chunks of the stream may end anywhere, even within a mark."""
    del case
    tagger = HostTagger("0a1b2c3d")
    ranks = DRAW.randint(1, 12)
    lines = {
        rank: [bytes(DRAW.choices(b"abc <:>0123456789", k=DRAW.randint(0, 30))) for _ in range(DRAW.randint(1, 6))]
        for rank in range(ranks)
    }
    queues = {rank: list(chain.from_iterable(pieces_of(line + b"\n") for line in lines[rank])) for rank in lines}
    stream = b""
    while waiting := [rank for rank in queues if queues[rank]]:
        rank = DRAW.choice(waiting)
        stream += tagger.pattern.replace("%r", str(rank)).encode() + queues[rank].pop(0)
    out = b""
    while stream:
        end = DRAW.randint(1, 40)
        out += tagger.feed(stream[:end])
        stream = stream[end:]
    out += tagger.finish()
    for rank in range(ranks):
        tag = b"[%d] " % rank
        assert [line.removeprefix(tag) for line in out.split(b"\n") if line.startswith(tag)] == lines[rank]


def test_mpiexecs_own_lines_have_no_tag() -> None:
    tagger = HostTagger("0a1b2c3d")
    mark = tagger.pattern.replace("%r", "1")
    given = tagger.feed(f"{mark}one\n[mpiexec@a] trouble\n{mark}tw".encode()) + tagger.feed(f"{mark}o\n".encode())
    assert given == b"[1] one\n[mpiexec@a] trouble\n[1] two\n"


# -- settings

TEXTS = [
    "",
    " ",
    "-1",
    "0",
    "1e400",
    "inf",
    "nan",
    "1e9",
    "99999999999999999999",
    "9" * 400,
    "0x10",
    "٣",
    "x\n",
    "-0.0",
]


def read(environment: dict[str, str]) -> tuple[Settings | None, str]:
    """Return the settings, or the error's text."""
    try:
        return Settings.from_environment(environment), ""
    except ArgumentError as error:
        return None, str(error)


@pytest.mark.parametrize("name", [each.metadata["name"] for each in fields(Settings)])
def test_a_number_is_in_its_range_or_an_error_names_it(name: str) -> None:
    """An accepted number fits its use: 64 bits, and times that the native core counts in nanoseconds."""
    for text in TEXTS:
        settings, told = read({name: text})
        if settings is None:
            assert told.startswith(f"{name}=")
            assert ": want " in told
            assert len(told) < 500
            continue
        field = next(each for each in fields(Settings) if each.metadata["name"] == name)
        value = getattr(settings, field.name)
        if isinstance(value, float):
            assert 0 < value <= 1e9
            assert math.isfinite(value)
        elif isinstance(value, int):
            assert 0 <= value < 1 << 63


# -- variables that --env cannot set

ALONE = HostPlace(
    hosts=(("localhost", 1),),
    index=0,
    job="j",
    rendezvous="@x",
    reports="@x",
    secret="s",  # noqa: S106 -- of no job
    threads=1,
    torch_address="127.0.0.1",
    torch_port=1234,
)
LAUNCHERS = {
    **environment_of(rank=0, size=1, local_rank=0, local_size=1, rendezvous="@x", job="j"),
    **torch_environment(ALONE, 0, {}),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_env_is_taken_or_refused_never_replaced(name: str) -> None:
    given = {name: "31999"}
    try:
        refuse_places(given, horovod=False, timeline=False)
    except ArgumentError as error:
        assert f"--env {name}" in str(error)  # noqa: PT017 -- or it is taken
        assert "31999" not in str(error)  # noqa: PT017 -- a value may be a secret
        return
    assert torch_environment(ALONE, 0, given)[name] == "31999"


# -- closed standard streams


@pytest.mark.parametrize("closed", [each for each in product((False, True), repeat=3) if any(each)])
def test_closed_streams_lead_nowhere_and_no_file_takes_their_numbers(closed: tuple[bool, bool, bool]) -> None:
    program = (
        "import os, sys\n"
        f"for number, is_closed in enumerate({closed}):\n    if is_closed: os.close(number)\n"
        "from multiring._launch.standard_streams import open_closed_streams\n"
        "open_closed_streams()\n"
        "assert min(os.pipe()) > 2\n"
        f"null = os.stat('/dev/null').st_rdev\n"
        f"assert [os.fstat(n).st_rdev == null for n in range(3) if {closed}[n]] == [True] * {sum(closed)}\n"
        "os._exit(5)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    assert subprocess.run([sys.executable, "-c", program], check=False, **pipes).returncode == 5  # type: ignore[call-overload]


# -- addresses shared by hosts


@pytest.mark.parametrize("case", range(40))
def test_addresses_that_cannot_lead_to_another_host_are_named(case: int) -> None:
    del case
    hosts = DRAW.randint(2, 4)
    networks = [f"boot{host} {4026531840 + host}" for host in range(hosts)]
    ranks = [DRAW.randrange(hosts) for _ in range(DRAW.randint(2, 8))]
    address_of = [f"10.0.{DRAW.randint(0, 1)}.{DRAW.randint(1, 3)}" for _ in range(hosts)]
    peer_infos = [{"network": networks[host]} for host in ranks]
    rails = [[RailEndpoint("eth0", address_of[host], 1000 + rank, None)] for rank, host in enumerate(ranks)]
    used = {host: address_of[host] for host in ranks}
    shared = {address for address in used.values() if list(used.values()).count(address) > 1}
    try:
        refuse_shared_addresses(peer_infos, rails)
    except Exception as error:  # noqa: BLE001 -- which is compared
        assert any(address in str(error) for address in shared)  # noqa: PT017
        assert "MULTIRING_INTERFACE" in str(error)  # noqa: PT017
    else:
        assert not shared

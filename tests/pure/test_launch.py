"""The parts of the launcher that start no process: shares of cores, tagged lines, the watchdog's state."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._launch.cores import cores_of_cpus, share_cpus, thread_variables, threads_per_rank
from multiring._launch.output import LineTagger, Outlet, RankStream, ShownOutput
from multiring._launch.watchdog import _groups


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 2))
def test_cpus_are_shared_out_evenly_and_completely(cpus: int, ranks: int, threads_a_core: int) -> None:
    core_of = {cpu: (0, cpu // threads_a_core) for cpu in range(cpus)}
    shares = share_cpus(core_of, ranks)
    assert len(shares) == ranks
    assert set().union(*shares) == set(range(cpus))
    if ranks <= cpus:
        assert sum(map(len, shares)) == cpus
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    threads = threads_per_rank(core_of, ranks)
    assert threads >= 1
    assert all(threads <= len({core_of[cpu] for cpu in share}) for share in shares)


def test_hardware_threads_of_one_core_stay_together() -> None:
    # Linux's numbering of two packages with two cores of two threads each: sibling threads are 4 apart.
    core_of = {cpu: (cpu % 4 // 2, cpu % 2) for cpu in range(8)}
    assert share_cpus(core_of, 4) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert threads_per_rank(core_of, 4) == 1
    assert threads_per_rank(core_of, 2) == 2


def test_threads_keep_to_the_limit_of_cpu_time() -> None:
    core_of = {cpu: (0, cpu) for cpu in range(8)}
    wanted = {None: 4, 16.0: 4, 8.0: 4, 4.0: 2, 3.9: 1, 2.0: 1, 0.5: 1}
    assert {limit: threads_per_rank(core_of, 2, limit) for limit in wanted} == wanted


def test_cores_are_read_from_the_system(tmp_path: Path) -> None:
    topology = tmp_path / "cpu1" / "topology"
    topology.mkdir(parents=True)
    (topology / "physical_package_id").write_text("1\n", encoding="ascii")
    (topology / "core_id").write_text("7\n", encoding="ascii")
    assert cores_of_cpus([0, 1], tmp_path) == {0: (0, 0), 1: (1, 7)}


def test_thread_counts_are_set_unless_the_user_did() -> None:
    assert thread_variables({}, 3)["OMP_NUM_THREADS"] == "3"
    assert thread_variables({"OMP_NUM_THREADS": "8"}, 3) == {}
    chosen = thread_variables({"MKL_NUM_THREADS": "8"}, 3)
    assert "MKL_NUM_THREADS" not in chosen
    assert chosen["OMP_NUM_THREADS"] == "3"


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\r", b"\n", b"a", b"bc\r"]), max_size=12))
def test_tagging_keeps_every_byte_and_adds_a_tag_a_line(pieces: list[bytes]) -> None:
    tagger = LineTagger(b"[0] ")
    out = b"".join([tagger.feed(piece) for piece in pieces] + [tagger.finish()])
    whole = b"".join(pieces)
    lines = whole.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    assert out == b"".join(tagged(line) + b"\n" for line in lines)


def tagged(line: bytes) -> bytes:
    """Return a line as the launcher prints it. A carriage return begins a new tagged line, except before a newline."""
    end = b"\r" if line.endswith(b"\r") else b""
    *bars, last = line.removesuffix(b"\r").split(b"\r")
    return b"\r".join([*(b"[0] " + bar if bar else b"" for bar in bars), b"[0] " + last + end])


def test_a_progress_bar_is_seen_as_it_grows() -> None:
    tagger = LineTagger(b"[0] ")
    assert tagger.feed(b"epoch 1\n\r 10%") == b"[0] epoch 1\n\r[0]  10%"
    assert tagger.feed(b" x") == b" x"
    assert tagger.feed(b"\r 20%\r") == b"\r[0]  20%"
    assert tagger.feed(b"\n") == b"\r\n"
    assert tagger.feed(b"no") == b""
    assert list(tagger.last_lines) == [b"epoch 1", b" 20%\r"]


def test_a_question_is_seen_before_its_line_ends() -> None:
    tagger = LineTagger(b"[1] ", is_live=True)
    assert tagger.feed(b"(Pdb) ") == b"[1] (Pdb) "
    assert tagger.feed(b"x\n(Pdb) ") == b"x\n[1] (Pdb) "
    assert tagger.finish() == b"\n"


def test_a_line_that_comes_into_another_ends_it() -> None:
    reader, writer = os.pipe()
    outlet, bar, other = Outlet(writer), LineTagger(b"[0] "), LineTagger(b"[1] ")
    for tagger, data in ((bar, b"\r 10%"), (other, b"a line\n"), (bar, b"!"), (other, b"\r 5%"), (bar, b"\n")):
        outlet.add(tagger.feed(data), tagger)
    outlet.add(b"ours\n")
    outlet.write_some()
    assert os.read(reader, 1000) == b"\r[0]  10%\n[1] a line\n[0] !\r[1]  5%\nours\n"
    os.close(reader)
    os.close(writer)


def test_only_whole_lines_are_given_out() -> None:
    tagger = LineTagger(b"> ")
    assert tagger.feed(b"one\ntw") == b"> one\n"
    assert tagger.feed(b"o") == b""
    assert tagger.feed(b"\n") == b"> two\n"


def test_an_endless_line_is_cut_and_takes_bounded_memory() -> None:
    tagger = LineTagger(b"> ")
    out = b"".join(tagger.feed(b"x" * 10_000) for _ in range(100)) + tagger.finish()
    assert out.replace(b"> ", b"").replace(b"\n", b"") == b"x" * 1_000_000
    assert out.count(b"\n") == 1_000_000 // 65536 + 1
    assert all(len(line) <= 2000 for line in tagger.last_lines)


def test_the_last_lines_are_kept() -> None:
    tagger = LineTagger(b"")
    tagger.feed(b"".join(b"%d\n" % number for number in range(100)))
    assert list(tagger.last_lines) == [b"%d" % number for number in range(60, 100)]


def test_an_outlet_writes_what_was_added_and_drops_it_once_broken() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    outlet.add(b"hello")
    outlet.write_some()
    assert os.read(reader, 100) == b"hello"
    assert outlet.is_empty
    os.close(reader)
    outlet.add(b"more")
    outlet.write_some()
    assert isinstance(outlet.failure_to_report, BrokenPipeError)
    outlet.add(b"more")
    assert outlet.is_empty
    os.close(writer)


def test_an_outlet_keeps_what_a_non_blocking_descriptor_refuses() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    outlet = Outlet(writer)
    outlet.add(b"x" * (1 << 21))
    assert outlet.is_full
    for _ in range(40):
        outlet.write_some()
    assert not outlet.is_empty
    assert outlet.failure_to_report is None
    os.close(reader)
    os.close(writer)


def test_a_log_that_cannot_be_written_is_reported_and_the_stream_goes_on() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(-1)
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = RankStream(os.fdopen(reader, "rb", buffering=0), ShownOutput(LineTagger(b"> "), outlet, full))
        os.write(writer, b"one\ntwo")
        assert stream.read_some()
        assert stream.log_failure is not None
        assert stream.log_failure.strerror == "No space left on device"
        assert not stream.read_some()
        os.close(writer)
        assert not stream.read_some()
    assert not stream.is_open
    assert stream.last_lines == [b"one", b"two"]


@pytest.mark.parametrize(
    ("heard", "groups"), [(b"", set()), (b"+1\n+2\n", {1, 2}), (b"+1\n-1\n+3\n", {3}), (b"-4\n", set())]
)
def test_a_guard_watches_the_groups_that_are_still_there(heard: bytes, groups: set[int]) -> None:
    assert _groups(heard) == groups

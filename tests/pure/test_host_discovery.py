"""The script that names the hosts of a job: its answers, and what becomes of bad ones."""

import selectors
import time
from pathlib import Path

import pytest

from multiring._launch import host_discovery
from multiring._launch.host_discovery import DiscoveryOptions, HostDiscovery, hosts_in
from multiring.errors import ArgumentError, LaunchError

GOOD = (("a", 2), ("b", 4))


def answered(discovery: HostDiscovery) -> None:
    """Wait for the next answer."""
    until = time.monotonic() + 240
    while not discovery.act():
        assert time.monotonic() < until
        with selectors.PollSelector() as poll:
            discovery.watch(poll)
            for key, _ in poll.select(0.02):
                key.data()


@pytest.mark.parametrize(("text", "slots", "hosts"), [
    ("a:2\nb:4\n", 1, GOOD),
    ("\n a:2 \nb\n\n", 4, GOOD),
])  # fmt: skip
def test_lines_are_hosts(text: str, slots: int, hosts: tuple[tuple[str, int], ...]) -> None:
    assert hosts_in(text, slots) == hosts


@pytest.mark.parametrize(("text", "why"), [
    ("", "it printed no host"),
    ("a:2\nb:x\n", "it printed 'b:x', want lines like host:4"),
    ("a:2\na:3\n", "it printed a twice"),
    ("a:2,b:4\n", "it printed 'a:2,b:4', want lines like host:4"),
    ("a:0\n", "it printed 'a:0', want lines like host:4"),
    ("Traceback (most recent call last):\n", "it printed 'Traceback (most recent call last):', want lines"),
])  # fmt: skip
def test_other_lines_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", r"\(").replace(")", r"\)")):
        hosts_in(text, 1)


@pytest.mark.parametrize(("bad", "why"), [
    ("exit 3", "exit code 3"),
    ("kill -9 $PPID", "it was killed by signal 9"),
    ("echo nonsense to read", "it printed 'nonsense to read'"),
    ("true", "it printed no host"),
    ("yes | head -c 2000000", "it printed more than 1048576 bytes"),
    ("sleep 1000", "it has not ended within 0.5 s"),
    ("sleep 1000 & echo c:1", "it has not ended within 0.5 s"),
])  # fmt: skip
def test_a_bad_answer_keeps_the_last_good_one_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, why: str
) -> None:
    monkeypatch.setattr(host_discovery, "_PAUSE_S", 0.0)
    script = tmp_path / "script"
    script.write_text("printf 'a:2\\nb:4\\n'")
    said: list[str] = []
    discovery = HostDiscovery(DiscoveryOptions(script=f"sh {script}"), said.append)
    try:
        answered(discovery)
        assert (discovery.hosts, discovery.failure, said) == (GOOD, "", [])
        monkeypatch.setattr(host_discovery, "_MOST_S", 0.5 if "sleep" in bad else 60.0)
        script.write_text(bad)
        for _ in range(3):
            answered(discovery)
            assert discovery.hosts == GOOD
            assert discovery.failure.startswith(why)
        assert len(said) == 1
        assert why in said[0]
        assert said[0].endswith("its last good answer is kept: a:2,b:4")
        monkeypatch.setattr(host_discovery, "_MOST_S", 60.0)
        script.write_text("echo c:1")
        answered(discovery)
        assert (discovery.hosts, discovery.failure) == ((("c", 1),), "")
    finally:
        discovery.close()


def test_the_first_answer_must_be_good_and_have_enough_places() -> None:
    for script, timeout_s, why in (
        ("exit 4", 60.0, "exit code 4"),
        ("echo a:2", 3.0, "a:2 after 3 s; want at least 3 places"),
    ):
        discovery = HostDiscovery(DiscoveryOptions(script=script, timeout_s=timeout_s), lambda _: None)
        try:
            with pytest.raises(LaunchError, match=why):
                discovery.first(3)
        finally:
            discovery.close()


def test_options_are_checked() -> None:
    with pytest.raises(ArgumentError, match="--slots-per-host 0: want 1 or more"):
        DiscoveryOptions(script="true", slots=0)
    with pytest.raises(ArgumentError, match="--elastic-timeout -1: want 0 or more seconds"):
        DiscoveryOptions(script="true", timeout_s=-1.0)

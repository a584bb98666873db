"""The goodput of jobs whose hosts fail: closed forms against jobs that are played with random draws."""

import json
import random

import pytest

from multiring._cli import main
from multiring._simulator.failures import Failures, elastic_goodput, restarted_goodput
from multiring.errors import ArgumentError

HOUR_S = 3600.0
STEP = ["simulate", "--topology", "p5", "--model", "resnet50", "--batch-per-rank", "64", "--rate", "2500"]


def failures(per_hour: float, every_s: float, restart_s: float, *, commit_s: float = 0, go_on_s: float = 5) -> Failures:
    return Failures(per_hour=per_hour, commit_every_s=every_s, commit_s=commit_s, restart_s=restart_s, go_on_s=go_on_s)


def played_restarts(of: Failures, hosts: int, commits: int) -> float:
    """Return the goodput of a job that is played until so many commits: all hosts must hold out for each."""
    drawn = random.Random(5)  # noqa: S311 -- failures are drawn, not secrets
    rate = of.per_hour / HOUR_S * hosts
    now_s, done = 0.0, 0
    fails_s = drawn.expovariate(rate)
    while done < commits:
        end_s = now_s + of.commit_every_s + of.commit_s
        if fails_s >= end_s:
            now_s, done = end_s, done + 1
            continue
        while fails_s < end_s:  # the restart, which a further failure begins again
            now_s = fails_s
            fails_s, end_s = now_s + drawn.expovariate(rate), now_s + of.restart_s
        now_s = end_s
    return commits * of.commit_every_s / now_s


def played_elastic(of: Failures, hosts: int, days: float) -> float:
    """Return the goodput of an elastic job whose rate is in proportion to its hosts, with each host drawn by itself."""
    drawn = random.Random(7)  # noqa: S311 -- failures are drawn, not secrets
    per_s = of.per_hour / HOUR_S
    fails_s = [drawn.expovariate(per_s) for _ in range(hosts)]
    back_s: dict[int, float] = {}  # the hosts that are away, and when each is replaced
    now_s, work, end_s = 0.0, 0.0, days * 86400
    while now_s < end_s:
        for host in [host for host, at in back_s.items() if at <= now_s]:
            del back_s[host]
            fails_s[host] = now_s + drawn.expovariate(per_s)
        there = [host for host in range(hosts) if host not in back_s]
        if not there:
            now_s = min(back_s.values())
            continue
        first = min(there, key=fails_s.__getitem__)
        commit_s = now_s + of.commit_every_s + of.commit_s
        if fails_s[first] >= commit_s:
            work += of.commit_every_s * len(there) / hosts
            now_s = commit_s
            continue
        now_s = fails_s[first]
        back_s[first] = now_s + of.restart_s
        pause_s = now_s + of.go_on_s
        while len(back_s) < hosts:  # a failure in the pause begins it again
            first = min((host for host in range(hosts) if host not in back_s), key=fails_s.__getitem__)
            if fails_s[first] >= pause_s:
                break
            now_s = fails_s[first]
            back_s[first], pause_s = now_s + of.restart_s, now_s + of.go_on_s
        now_s = pause_s
    return work / now_s


@pytest.mark.parametrize(
    ("per_hour", "hosts", "every_s", "restart_s", "commit_s"),
    [(0.01, 16, 600, 300, 0), (0.05, 64, 300, 120, 10), (0.5, 8, 900, 600, 0)],
)
def test_restarts_take_what_played_jobs_take(
    per_hour: float, hosts: int, every_s: float, restart_s: float, commit_s: float
) -> None:
    of = failures(per_hour, every_s, restart_s, commit_s=commit_s)
    found = restarted_goodput(of, hosts)
    lost = 1 - played_restarts(of, hosts, 200_000)
    assert lost > 0.02
    assert 1 - found == pytest.approx(lost, rel=0.05)


@pytest.mark.parametrize(
    ("per_hour", "hosts", "every_s", "restart_s"), [(0.02, 8, 300, 1200), (0.05, 16, 120, 600), (0.2, 4, 60, 1800)]
)
def test_elastic_jobs_take_what_played_jobs_take(per_hour: float, hosts: int, every_s: float, restart_s: float) -> None:
    of = failures(per_hour, every_s, restart_s, go_on_s=15)
    found = elastic_goodput(of, hosts, float)
    lost = 1 - played_elastic(of, hosts, 1500 / hosts / per_hour)
    assert lost > 0.01
    assert 1 - found == pytest.approx(lost, rel=0.06)
    assert restarted_goodput(of, hosts) < found - 0.02


def test_limits_of_the_closed_forms() -> None:
    never = failures(0, 60, 300, commit_s=20)
    assert restarted_goodput(never, 5) == elastic_goodput(never, 5, float) == pytest.approx(0.75)
    always = failures(1e9, 60, 300)
    assert restarted_goodput(always, 5) == elastic_goodput(always, 5, float) == 0
    alone = failures(0.1, 60, 300)
    assert elastic_goodput(alone, 1, float) == restarted_goodput(alone, 1)
    # Young's first order: half of the time between commits and the restart, for each failure.
    rare = failures(0.001, 600, 300)
    assert restarted_goodput(rare, 10) == pytest.approx(1 - 0.01 / HOUR_S * (300 + 300), abs=2e-6)


def test_elastic_jobs_have_the_rates_of_fewer_hosts() -> None:
    asked: list[int] = []

    def rate_of(hosts: int) -> float:
        asked.append(hosts)
        return 1.0 if hosts == 4096 else 0.5

    assert elastic_goodput(failures(0.01, 60, 600), 4096, rate_of) < 0.55
    assert len(asked) <= 5
    assert max(asked) == 4096


@pytest.mark.parametrize("wrong", [{"per_hour": -1}, {"every_s": 0}, {"restart_s": float("nan")}])
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="want finite numbers from 0"):
        failures(**{"per_hour": 1, "every_s": 1, "restart_s": 1, **wrong})


def test_goodput_is_printed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*STEP, "--ranks", "8,16", "--failures-per-hour", "0.01", "--restart-seconds", "300"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == {
        "per_hour": 0.01,
        "commit_every_s": 600,
        "commit_s": 0,
        "restart_s": 300,
        "go_on_s": 15.14,
    }
    of = failures(0.01, 600, 300, go_on_s=15.14)
    one, two = found["steps"]
    assert one["restarted_goodput"] == one["elastic_goodput"] == restarted_goodput(of, 1)
    rates = {1: one["samples_per_s"], 2: two["samples_per_s"]}
    assert two["elastic_goodput"] == pytest.approx(elastic_goodput(of, 2, rates.__getitem__), rel=1e-12)
    assert main(command) == 0
    head, first, second = (line.split() for line in capsys.readouterr().out.splitlines()[1:4])
    assert head[-2:] == ["restarted", "elastic"]
    assert first[-2:] == [f"{one[name]:.1%}" for name in ("restarted_goodput", "elastic_goodput")]
    assert second[-1] == f"{two['elastic_goodput']:.1%}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--failures-per-hour", "1"], "want --restart-seconds S, too"),
        (["--restart-seconds", "1"], "--restart-seconds 1: want it with --failures-per-hour F only"),
        (["--failures-per-hour", "-1", "--restart-seconds", "1"], "--failures-per-hour -1: want a number, 0 to"),
        (
            ["--failures-per-hour", "1", "--restart-seconds", "1", "--sweep", "lag=0,1"],
            "--sweep and --failures-per-hour",
        ),
        (["--commit-every", "60", "--sweep", "lag=0,1"], "--commit-every 60: want it with --failures-per-hour F only"),
        (["--html", "page.html", "--sweep", "lag=0,1"], "--sweep and --html"),
    ],
)
def test_wrong_options_are_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "--ranks", "8", *words]) == 2
    assert reason in capsys.readouterr().err

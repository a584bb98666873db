"""`multiring doctor` on this host, under launchers, and on ill virtual hosts, which it names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.wire.test_launchers import environment, mpi_job, run

from multiring._cli import main
from multiring._diagnosis.transfers import slope_of
from multiring._settings import inherited_environment

RANK = Path(__file__).parents[2] / "benchmarks" / "evidence" / "doctor" / "rank.py"
IN_A_LAB = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
LONGEST_S = 150.0  # a check takes 10 s, and several times that if the cores are busy


def report_of(*words: str, **variables: str) -> dict[str, Any]:
    """Return the report that `multiring WORDS...` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "multiring", *words],
        env=inherited_environment() | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    report = printed(done)
    assert report["code"] == done.returncode, (report["findings"], done.stderr)
    return report


def printed(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return the one report in the output of a job."""
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"findings"' in line]
    assert len(lines) == 1, (done.stdout, done.stderr)
    report: dict[str, Any] = json.loads(lines[0])
    return report


def named(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the findings by kind and place, without those of other work on this machine, which tests cannot rule out.

    It makes a virtual host busy, or slower than the others at computing. Rules about both have tests without machines.
    """
    return {
        (each["kind"], each["where"]): each["found"]
        for each in report["findings"]
        if each["kind"] != "busy" and not each["found"].startswith("it computes at")
    }


def lab(hosts: int, faults: list[dict[str, Any]], *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [sys.executable, str(RANK), json.dumps(faults), *options]
    return report_of("lab", "--hosts", str(hosts), "--link", "100mbit", *words, "--", *command)


def own_report(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code = main(["doctor", "--json", *options])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["code"] == code
    return report


def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    report = own_report(capsys, "--need-shm", "0", "--need-files", "64")
    assert named(report) == {}
    (host,) = report["hosts"]
    assert host["name"] == os.uname().nodename
    assert host["versions"]["Python"].startswith("3.")
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert host["work_s"] > 0
    assert host["ranks"] == 1


def test_needs_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    needs = ("--need-memory", "4000TiB", "--need-shm", "4000TiB", "--need-files", "1000000000")
    report = own_report(capsys, *needs, "-n", str(len(os.sched_getaffinity(0)) + 1))
    assert report["code"] == 1
    assert set(named(report)) == {(kind, os.uname().nodename) for kind in ("memory", "shm", "files", "oversubscribed")}


def test_the_text_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--need-memory", "4000TiB"]) == 1
    out = capsys.readouterr().out
    assert "memory (certain): " in out
    assert "want 4194304000.0 MiB\n    do: end other programs" in out
    assert "1 host, 1 rank" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [(["-n", "0"], "-n 0"), (["--need-files", "-1"], "--need-files -1"), (["--need-memory", "much"], "'much'")],
)
def test_bad_input(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["doctor", *options])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_ranks_of_one_host_are_counted() -> None:
    report = report_of("run", "-n", "2", "--", "multiring", "doctor", "--json", "--need-shm", "0")
    assert [host["ranks"] for host in report["hosts"]] == [2]


@pytest.mark.parametrize("starts", ["mpich", "openmpi"])
@pytest.mark.parametrize("loads", ["mpich", "openmpi"])
def test_an_mpi_that_another_mpi_started_is_a_finding(starts: str, loads: str) -> None:
    prefix, variables = mpi_job(starts)
    variables |= {"MPI4PY_LIBMPI": mpi_job(loads)[1]["MPI4PY_LIBMPI"]}
    command = [*prefix, sys.executable, "-m", "multiring", "doctor", "--json", "--need-shm", "0", "--need-files", "64"]
    report = printed(run(command, variables))
    kinds = {kind for kind, _ in named(report)} - {"oversubscribed"}
    assert kinds == (set() if starts == loads else {"mpi"})
    if starts == loads:
        assert [host["ranks"] for host in report["hosts"]] == [2]


def test_torchrun() -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--no-python"]
    command = [sys.executable, "-W", "ignore", *torchrun, sys.executable, "-m", "multiring", "doctor", "--json"]
    report = printed(run([*command, "--need-shm", "0", "--need-files", "64", "-n", "1"], environment()))
    assert named(report) == {}
    assert [host["ranks"] for host in report["hosts"]] == [1]


@pytest.mark.parametrize("count", [21, 22])
def test_the_rate_is_a_slope_that_late_acknowledgements_do_not_change(count: int) -> None:
    steady = [(0.1 * at, 1000 * at) for at in range(count)]
    late = [(seconds, size - 700 * (at % 10 == 3)) for at, (seconds, size) in enumerate(steady)]
    assert slope_of(steady) == pytest.approx(10_000)
    assert slope_of(late) == pytest.approx(10_000)
    assert slope_of([(0.1 * at, 0) for at in range(count)]) is None
    assert slope_of([(0.0, 0)] * count) is None


@IN_A_LAB
def test_healthy_hosts_have_no_finding() -> None:
    report = lab(4, [], "--rack", "2", "--uplink", "50mbit", "--slots", "2,1,1,1")
    assert named(report) == {}
    assert [host["name"] for host in report["hosts"]] == ["host0", "host1", "host2", "host3"]
    assert [host["ranks"] for host in report["hosts"]] == [2, 1, 1, 1]
    assert len(report["pairs"]) == 12
    rates = {(pair["source"], pair["target"]): pair["bytes_per_s"] * 8e-6 for pair in report["pairs"]}
    within = [rate for (source, target), rate in rates.items() if source // 2 == target // 2]
    assert min(within) > max(rate for rate in rates.values() if rate not in within)


@IN_A_LAB
def test_ill_hosts_are_named() -> None:
    faults: list[dict[str, Any]] = [
        # rank 0 is reached through another host
        {"host": "host3", "do": "no_route", "address": "10.77.0.1"},
        {"host": "host1", "do": "mtu", "interface": "rail0", "value": 1400},
        {"host": "host2", "do": "files", "value": 600},
        {"host": "host2", "do": "clock", "value": -0.08},
        {"host": "host2", "do": "rate", "interface": "rail0", "value": 50_000_000},
        {"host": "host0", "do": "version", "package": "numpy", "value": "1.0"},
        {"host": "host4", "do": "variable", "name": "MULTIRING_INTERFACE", "value": "absent0"},
    ]
    found = named(lab(5, faults))
    assert set(found) == {
        ("firewall", "host0, host3"),
        ("mtu", "host1"),
        ("files", "host2"),
        ("clock", "host2"),
        ("slow-interface", "host2"),
        ("version", "host0"),
        ("wrong-interface", "host4"),
    }
    assert "1400 on host1; 1500 on the other hosts" in found["mtu", "host1"]
    assert "80 ms slow" in found["clock", "host2"]
    assert "numpy is 1.0 on host0" in found["version", "host0"]


@IN_A_LAB
def test_a_host_that_does_not_come_is_a_finding_and_the_report_comes() -> None:
    report = lab(3, [{"host": "host1", "do": "late", "value": 61}])
    assert set(named(report)) == {("silent", "rank 1")}
    assert [host["name"] for host in report["hosts"]] == ["host0", "host2"]

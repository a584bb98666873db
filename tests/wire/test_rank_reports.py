"""Reports of ranks to their launcher that arrive when the rank has ended already."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from multiring._launch.job import Job
from multiring._launch.job_process import Start
from multiring._launch.rank_reports import RankReports
from multiring._settings import RANK_JOINS, RANK_LOST, roll_address


@pytest.fixture
def place() -> str:
    return f"@multiring-{secrets.token_hex(8)}"


@pytest.fixture
def reports(place: str) -> Iterator[RankReports]:
    made = RankReports(place)
    yield made
    made.close()


@pytest.fixture
def rank(place: str) -> Iterator[Callable[..., int]]:
    """A process that sends each report that it is asked for; without a report it ends."""
    program = f"""
import socket, sys
made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for line in sys.stdin:
    made.sendto(line.strip().encode(), {roll_address(place)!r})
    print("sent", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def asked(*sent: bytes) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            for each in sent:
                process.stdin.write(each.decode() + "\n")
                process.stdin.flush()
                assert process.stdout.readline() == "sent\n"
            if not sent:
                process.stdin.close()
                process.wait()
            return process.pid

        yield asked
        process.kill()


def test_the_last_report_of_a_rank_counts_when_its_process_is_gone(
    reports: RankReports, rank: Callable[..., int]
) -> None:
    pid = rank(RANK_JOINS % 0)
    reports.hear()
    rank(RANK_LOST % (0, 1))
    rank()
    reports.hear()
    assert reports.lost_by(pid) == {-1}


def test_a_stranger_whose_process_is_gone_is_ignored(reports: RankReports, rank: Callable[..., int]) -> None:
    pid = rank(RANK_LOST % (0, 1))
    rank()
    reports.hear()
    assert reports.lost_by(pid) == set()


class _Watched(Job):
    """A job that asks for the session of each process that has ended."""

    sessions: list[int]

    def _reaping(self, pid: int) -> None:
        self.sessions.append(os.getsid(pid))


def test_a_job_hears_reports_before_the_system_forgets_the_process() -> None:
    job = _Watched(
        [
            Start(
                name="rank 0",
                tag="[0] ",
                log_files=("out", "err"),
                command=(sys.executable, "-c", "raise SystemExit(3)"),
                environment=dict(os.environ),
                prepare=lambda: None,
            )
        ],
        None,
    )
    job.sessions = []
    began_s = time.monotonic()
    assert job.run() == 3
    assert len(job.sessions) == 1
    assert time.monotonic() - began_s < 60

"""A second SIGTERM ends the ranks at once, except one that comes within milliseconds, as Slurm's at a time limit."""

import signal
from types import SimpleNamespace

import pytest

from multiring._launch import job as job_module
from multiring._launch.job import Job


class AskedJob(Job):
    """A job without processes."""

    def _stop_leftovers(self, known: set[int]) -> None:
        pass

    def kills_at(self, number: int) -> float | None:
        """Receive a signal, and return when the ranks are killed."""
        self._on_signal(number)
        return self._kill_at


@pytest.mark.parametrize(
    ("second", "after_s", "killed_at"),
    [(signal.SIGTERM, 0.01, 130.0), (signal.SIGTERM, 3.0, 103.0), (signal.SIGINT, 0.01, 100.01)],
)
def test_the_second_signal(
    monkeypatch: pytest.MonkeyPatch,
    second: signal.Signals,
    after_s: float,
    killed_at: float,
) -> None:
    now = 100.0
    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=lambda: now))
    job = AskedJob([], None, 30.0)
    assert job.kills_at(signal.SIGTERM) == 130.0
    now += after_s
    assert job.kills_at(second) == pytest.approx(killed_at)

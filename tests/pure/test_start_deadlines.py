"""A start's time-out, as the user states it, bounds all its stages together: Ray, Dask and Slurm's allocations."""

import json
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from multiring._launch import allocations
from multiring._launch.agent_process import AgentProcess
from multiring._launch.allocations import SlurmAllocation, run_in_slurm
from multiring._launch.host_sessions import HostSessions
from multiring._launch.job import JobOptions
from multiring.dask.job import DaskJob
from multiring.errors import LaunchError
from multiring.ray import actors
from multiring.ray.actors import RankActors, WorkerRequest


class SlowRay:
    """Ray whose every answer takes four seconds, by the test's own clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timeouts: list[float] = []
        self.exceptions = SimpleNamespace(RayError=OSError, GetTimeoutError=TimeoutError, RayTaskError=KeyError)

    def get(self, references: Sequence[Any], timeout: float) -> list[Any]:
        self.timeouts.append(timeout)
        if timeout < 4:
            raise TimeoutError
        self.now += 4
        return list(references)


def test_all_questions_to_rays_actors_share_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay()
    monkeypatch.setattr(actors, "load_ray", lambda: ray)
    monkeypatch.setattr(actors, "time", SimpleNamespace(monotonic=lambda: ray.now))
    monkeypatch.setattr(RankActors, "_group", lambda *_: None)
    monkeypatch.setattr(RankActors, "_start", lambda *_: [])

    def join(ranks: RankActors, _actors: Sequence[Any], _facts: object) -> None:
        for each in range(5):
            ranks._get([each])

    monkeypatch.setattr(RankActors, "_facts", lambda *_: [])
    monkeypatch.setattr(RankActors, "_join", join)
    request = WorkerRequest(count=1, resources={"CPU": 1}, start_timeout_s=10)
    with pytest.raises(LaunchError, match=r"did not start within 10 s \(start_timeout_s\)"), RankActors(request):
        pass
    assert ray.timeouts == [10, 6, 2]


class FrozenClient:
    """A client of a Dask cluster whose scheduler tells its workers and then freezes."""

    def __init__(self) -> None:
        self.never: queue.Queue[None] = queue.Queue()
        self.scheduler_python = ".".join(map(str, sys.version_info))

    def get_versions(self) -> dict[str, Any]:
        return {"scheduler": {"host": {"python": self.scheduler_python}}, "workers": {}}

    def run_on_scheduler(self, _function: Callable[..., Any]) -> dict[str, int]:
        return {"worker": 4}

    def run(self, *_: Any, **__: Any) -> None:
        self.never.get()


def test_a_frozen_worker_of_dask_ends_the_start_at_its_own_time_out() -> None:
    client = FrozenClient()
    try:
        with pytest.raises(LaunchError, match=r"has not answered within 2 s"), DaskJob(client, 2, 0.1) as job:
            job.run(b"", {})
    finally:
        client.never.put(None)


def test_another_python_of_dasks_scheduler_is_named_before_it_is_sent_code() -> None:
    client = FrozenClient()
    client.scheduler_python = "3.9.1.final.0"
    with (
        pytest.raises(LaunchError, match=r"the Dask scheduler has Python 3\.9\.1\.final\.0, this process has 3\."),
        DaskJob(client, 2, 0.1) as job,
    ):
        job.run(b"", {})


def test_a_stated_time_out_is_that_of_an_allocations_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def step(_words: Sequence[str], _environment: Mapping[str, str], text: bytes) -> AgentProcess:
        told.update(json.loads(text))
        raise LaunchError("no Slurm here")

    def run(sessions: HostSessions, make: Callable[[JobOptions, int], Any], options: JobOptions) -> int:
        told["launcher's"] = make(options, 0)._task.patience_s
        sessions.open()
        return 0

    monkeypatch.setattr(allocations, "open_step", step)
    monkeypatch.setattr(allocations, "run_job", run)
    monkeypatch.setattr(allocations, "check_can_run", lambda *_: None)
    for stated, agents in (("7", 7), ("200", 60)):
        options = JobOptions(variables={"MULTIRING_INIT_TIMEOUT_S": stated})
        with pytest.raises(LaunchError, match="no Slurm here"):
            run_in_slurm(["true"], None, SlurmAllocation("1", (1, 1)), options)
        assert (told["launcher's"], told["patience_s"]) == (float(stated), agents)

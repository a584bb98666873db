"""Ranks with torch's CUDA build on stand-in devices, as hosts x devices; see tests/cuda."""

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tests.standin.torch_devices import install
from tests.support.nursery import Report
from tests.support.ranks import Here, Process, report_of, run_ranks

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))  # hosts and devices of each
# Training takes seconds in each shape, so `make test-cuda` has three; benchmarks/evidence/torch/on_devices.py has all.
HAS_ALL = "MULTIRING_TEST_ALL_SHAPES" in os.environ
TRAINING_SHAPES = SHAPES if HAS_ALL else ((1, 2), (2, 1), (2, 2))
SMALL_SHAPES = SHAPES if HAS_ALL else ((1, 1), (1, 2), (2, 1))


def run_cuda(
    function: Callable[..., Any], *arguments: Any, hosts: int | tuple[int, ...] = 1, devices: int = 2, **settings: Any
) -> list[Any]:
    """Return the results of `function(here, *arguments)` on hosts x devices ranks.

    Each rank is a process, with torch's CUDA build. Its current device is that of its number on its host, and its
    process sees all devices of the host.

    Args:
        function: a top-level function of a test file.
        arguments: arguments of the function.
        hosts: 1, 2 or 4. With several hosts, a host has at most 2 devices. Or the ranks of each host, as (3, 1).
        devices: devices of a host, and ranks of a host.
        settings: `standin` (a dict of the stand-ins' settings, such as {"seed": 3, "delay_us": 2000}), `killed` (how
            many processes of a rank kill themselves, each replaced by a new one, by rank; the function's last argument
            is then the number of the process, from 0), and options of `run_ranks`.
    """
    found: list[Any] = _on_devices(run_ranks, function, arguments, hosts, devices, settings)
    return found


def report_of_cuda(
    function: Callable[..., Any], *arguments: Any, hosts: int | tuple[int, ...] = 1, devices: int = 2, **settings: Any
) -> Report:
    """Run `function(here, *arguments)` as `run_cuda` does, and report the end of each rank, failed or not."""
    found: Report = _on_devices(report_of, function, arguments, hosts, devices, settings)
    return found


def _on_devices(
    run: Callable[..., Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    hosts: int | tuple[int, ...],
    devices: int,
    settings: dict[str, Any],
) -> Any:
    if isinstance(hosts, int):
        assert (hosts, devices) in SHAPES, (hosts, devices)
        engine = "shm" if hosts == 1 else ("tcp" if devices == 1 else "shm+tcp")
        sizes: tuple[int, ...] = (devices,) * hosts
    else:
        engine, sizes = f"shm+tcp:{','.join(map(str, hosts))}", hosts
    standin = {"devices": max(sizes), **settings.pop("standin", {})}
    job = JobOnDevices(sizes=sizes, standin=standin, killed=settings.pop("killed", None))
    here = (function.__module__, function.__qualname__)
    process = settings.pop("process", Process(nursery="torch", beforehand=(__name__, function.__module__)))
    return run(on_device, sum(sizes), *here, job, arguments, engine=engine, process=process, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOnDevices:
    """What all ranks of a job need to know."""

    sizes: tuple[int, ...]  # the ranks of each host
    standin: dict[str, Any]
    killed: dict[int, int] | None = None


def on_device(here: Here, module: str, name: str, job: JobOnDevices, arguments: tuple[Any, ...]) -> Any:
    """Run a function of a test file on one rank."""
    if job.killed is not None:
        arguments = (*arguments, _number_of_process(job.killed.get(here.rank, 0)))
    host = next(host for host, end in enumerate(accumulate(job.sizes)) if here.rank < end)
    settings = {"host": host, **job.standin}
    os.environ |= {f"STANDIN_{each.upper()}": str(value) for each, value in settings.items()}
    torch.set_num_threads(1)
    torch.cuda.set_device((here.rank - sum(job.sizes[:host])) % torch.cuda.device_count())
    function: Any = importlib.import_module(module)
    for each in name.split("."):
        function = getattr(function, each)
    return function(here, *arguments)


def _number_of_process(killed: int) -> int:
    """Fork `killed` processes, one after the death of the other; return the number of each, and of this process."""
    for number in range(killed):
        child = os.fork()
        if child == 0:
            return number
        _, status = os.waitpid(child, 0)
        assert status == signal.SIGKILL, f"process {number} ended with status {status} and was not killed"
    return killed


if "STANDIN_OPERATORS" in os.environ:  # else the devices are real, and ranks may share one
    install()  # once in the process from which ranks are forked

"""`init_process_group(init_method="multiring://")`: create torch's store among the ranks of a multiring job."""

from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import numpy as np
from torch._C._distributed_c10d import TCPStore

from multiring._runtime import Group
from multiring._runtime.bootstrap.addresses import own_address
from multiring._runtime.bootstrap.launchers import identify
from multiring._runtime.job.job import current, enter, is_initialized
from multiring._runtime.job.rank_or_worker import JoinAttempt
from multiring._runtime.job.world import World
from multiring._settings import Settings, foreign_environment
from multiring.errors import MultiringError
from multiring.torch.c10d.errors import torch_error

_ADDRESS_BYTES = 256
_LOOPBACK = "127.0.0.1"


class _Begun:
    """A mark of a job that this process joined for torch, and leaves when torch's group of all ranks ends."""


def store_of_job(url: str, timeout: timedelta | None) -> tuple[Any, int, int]:
    """Return a torch store for this process's job, this process's rank, and the number of ranks.

    Every rank must call this. If the process has not joined a job, it joins one; the launcher's environment determines
    its rank.

    Args:
        url: "multiring://", to which torch appends the rank and the number of ranks if the program passed them.
        timeout: the time that the ranks wait for each other; by default 30 minutes.

    Raises:
        ValueError: the program passed another rank or number of ranks than the job has.
        DistBackendError: the ranks could not connect.
    """
    patience = timedelta(minutes=30) if timeout is None else timeout
    try:
        world = current() if is_initialized() else _join(patience.total_seconds())
        membership = world.membership
        _refuse_other_place(url, membership.rank, membership.size)
        return _store(world, patience), membership.rank, membership.size
    except MultiringError as error:
        raise torch_error("init_method multiring://", error) from error


def is_begun_here(world: World) -> bool:
    """Return whether this process joined the job of `world` for torch."""
    return world.job_objects.get(_Begun) is not None


def _join(timeout_s: float) -> World:
    settings = Settings.from_environment()
    settings = settings.changed(init_timeout_s=timeout_s, stall_timeout_s=max(timeout_s, settings.stall_timeout_s))
    JoinAttempt(settings).become_rank()
    world = enter(identify(settings, foreign_environment()), settings, is_current=True)
    world.job_objects.made(_Begun, _Begun)
    return world


def _refuse_other_place(url: str, rank: int, size: int) -> None:
    given = dict(parse_qsl(urlparse(url).query))
    for name, value, what in (("rank", rank, "rank"), ("world_size", size, "number of ranks")):
        if given.get(name, str(value)) != str(value):
            raise ValueError(f"{name}={given[name]}: the {what} in the job is {value}; pass {value}, or omit {name}")


def _store(world: World, patience: timedelta) -> Any:
    """Return a store that rank 0 serves; rank 0 broadcasts its address to the other ranks."""
    group, rank, size = world.group, world.membership.rank, world.membership.size
    told = np.zeros(_ADDRESS_BYTES, np.uint8)
    served = None
    if rank == 0:
        host = _LOOPBACK if len(group.topology.hosts) == 1 else own_address(world.settings.interface)
        served = TCPStore(host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        text = f"{host} {served.port}".encode()
        told[: len(text)] = np.frombuffer(text, np.uint8)
    _told_by_rank_0(group, told)
    if served is not None:
        return served
    host, port = bytes(told).rstrip(b"\0").decode().split()
    return TCPStore(host, int(port), size, is_master=False, timeout=patience, wait_for_workers=False)


def _told_by_rank_0(group: Group, told: "np.ndarray[Any, Any]") -> None:
    if group.size > 1:
        group.twin_for("torch's store").broadcast(told)

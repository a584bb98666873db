"""Rendezvous of the ranks of a process group through torch's store; they then connect as in any other job.

Each rank writes its peer info to the store. Rank 0 reads all peer infos, and writes the rendezvous address and a new
secret to the store. Once all ranks have connected, the entries are deleted, because the store may be used again.
"""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from multiring._runtime import Group
from multiring._runtime.bootstrap.addresses import host_id
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous_point import RendezvousPoint, choose_rendezvous_point
from multiring._runtime.job.job import current, enter, is_rank, leave
from multiring._runtime.job.world import World
from multiring._settings import Settings
from multiring.errors import LaunchError
from multiring.torch.c10d.stores import is_begun_here

_GRACE_S = 5.0  # the time that rank 0 may need after its own timeout to name the missing ranks
_ANSWER = "multiring/answer"


@dataclass(frozen=True, slots=True)
class Met:
    """The result of a rendezvous."""

    world: World
    group: Group  # a group of all ranks, in their order, that only the caller uses
    is_ours: bool  # whether the backend joined the job for torch, and must leave it


def meet(store: Any, rank: int, size: int, timeout_s: float, *, is_default: bool) -> Met:
    """Join or create the job of `size` ranks in which this process is rank `rank`; every rank must call this.

    Args:
        store: a store of torch that all ranks of this group share, and no other group uses.
        rank: the rank of this process.
        size: the number of ranks.
        timeout_s: the time in seconds that the ranks wait for each other.
        is_default: whether these are all ranks of torch.distributed. The job then becomes this process's current job,
            as after `multiring.init`. If `multiring.init` was called before, its job is used.

    Raises:
        DistStoreError: ranks did not arrive in time.
        RuntimeError: only some ranks have called `multiring.init`, or it gave this process another rank.
        RendezvousError: the ranks could not connect.
    """
    joined = _joined(rank, size) if is_default else None
    if size == 1:
        answer = {"token": secrets.token_hex(8)} if joined else _alone()
        place = None
    else:
        peer_info = {"host": host_id(), "job": joined.identity.job if joined else ""}
        answer, place = _agree(store, rank, size, timeout_s, peer_info)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    world = joined or _enter(rank, size, timeout_s, (answer, place), is_default=is_default)
    try:
        group = world.group.subgroup_named(range(size), f"torch {answer['token']}")
        group.barrier()
        if rank == 0 and size > 1:
            _forget(store, size)
    except BaseException:
        if joined is None:
            leave(world)
        raise
    return Met(world, group, joined is None or is_begun_here(world))


def _joined(rank: int, size: int) -> World | None:
    """Return the job that this process has joined before, or None."""
    if not is_rank():
        return None
    world, here = current(), current().membership
    if (here.rank, here.size) != (rank, size):
        raise RuntimeError(
            f"multiring.init() made this process rank {here.rank} of {here.size}, but torch says "
            f"rank {rank} of {size}; call multiring.shutdown() first, or give each process the same rank in both"
        )
    return world


def _alone() -> dict[str, str]:
    return {"rendezvous": "", "secret": "", "job": "alone", "token": secrets.token_hex(8)}


def _enter(
    rank: int, size: int, timeout_s: float, meeting: tuple[dict[str, str], RendezvousPoint | None], *, is_default: bool
) -> World:
    answer, place = meeting
    settings = Settings.from_environment()
    identity = Identity(
        rank=rank,
        size=size,
        local_rank=None,
        local_size=None,
        rendezvous=answer["rendezvous"],
        secret=bytes.fromhex(answer["secret"]),
        job=answer["job"],
        source="torch.distributed",
        listener=place.listener if place else None,
    )
    patience = {"init_timeout_s": timeout_s, "stall_timeout_s": max(timeout_s, settings.stall_timeout_s)}
    return enter(identity, settings.changed(**patience), is_current=is_default)


def _agree(
    store: Any, rank: int, size: int, timeout_s: float, peer_info: dict[str, str]
) -> tuple[dict[str, str], RendezvousPoint | None]:
    """Return rank 0's answer, and on rank 0 also the rendezvous point where it listens."""
    store.set(_peer_info_of(rank), json.dumps(peer_info))
    if rank == 0:
        answer, place = _decide(store, size, timeout_s)
        store.set(_ANSWER, json.dumps(answer))
        return answer, place
    try:
        store.wait([_ANSWER], timedelta(seconds=timeout_s + _GRACE_S))
    except RuntimeError as error:
        raise dist.DistStoreError(
            f"rank 0 of {size} did not publish the rendezvous address within {timeout_s:g} s: rank 0 or another rank "
            "did not come"
        ) from error
    answer = json.loads(store.get(_ANSWER))
    return answer, None


def _decide(store: Any, size: int, timeout_s: float) -> tuple[dict[str, str], RendezvousPoint | None]:
    keys = [_peer_info_of(rank) for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank in range(size) if not store.check([_peer_info_of(rank)])]
        text = f"of {size} ranks, rank {', '.join(map(str, missing))} did not come within {timeout_s:g} s"
        store.set(_ANSWER, json.dumps({"error": text}))
        raise dist.DistStoreError(text) from error
    peer_infos = [json.loads(store.get(key)) for key in keys]
    token = secrets.token_hex(8)
    if any(peer_info["job"] for peer_info in peer_infos):
        return _same_job(peer_infos) or {"token": token}, None
    settings = replace(Settings.from_environment(), rendezvous=None, job=None)
    place = choose_rendezvous_point(
        settings, "torch", is_one_host=len({peer_info["host"] for peer_info in peer_infos}) == 1
    )
    if "error" in place.told:
        return {"error": str(LaunchError(f"rank 0 cannot listen: {place.told['error']}"))}, None
    return {**place.told, "token": token}, place


def _same_job(peer_infos: list[dict[str, str]]) -> dict[str, str] | None:
    without = [rank for rank, peer_info in enumerate(peer_infos) if not peer_info["job"]]
    if without:
        return {
            "error": f"ranks {without} have not called multiring.init(), but others have; call it on all ranks or none"
        }
    jobs = [peer_info["job"] for peer_info in peer_infos]
    if len(set(jobs)) > 1:
        return {"error": f"multiring.init() made the ranks join different jobs, {jobs}; want one job"}
    return None


def _forget(store: Any, size: int) -> None:
    for key in (_ANSWER, *map(_peer_info_of, range(size))):
        with suppress(RuntimeError, NotImplementedError):  # a store that cannot delete keys is not used again
            store.delete_key(key)


def _peer_info_of(rank: int) -> str:
    return f"multiring/{rank}"

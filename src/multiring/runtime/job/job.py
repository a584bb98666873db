"""The jobs that this process is in: joining and leaving them. It has one world at a time that is everybody's."""

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

from multiring.errors import StateError
from multiring.runtime.bootstrap.launchers import Identity
from multiring.runtime.bootstrap.rank_process import RankPosition
from multiring.runtime.engines.mpi_library import end_despite_mpi
from multiring.runtime.group.group import Group
from multiring.runtime.job.joining import join_job
from multiring.runtime.job.membership import Membership
from multiring.runtime.job.rank_or_worker import Attempt, Worker, WorkerGroup, refuse_other_systems, worker_here
from multiring.runtime.job.world import World
from multiring.settings import JobNews, Settings, withhold_secret

# At exit, operations in flight get this long: those that tell others of a wrong argument need it.
_EXIT_GRACE_S = 2.0


class _Current:
    """The process's one world at a time, and the lock that keeps it one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: World | None = None
        self.worker: Worker | None = None  # as `init` found it to be
        self.others: list[World] = []  # that are nobody's `current`
        self.exit_handler_set = False
        self.was_left = False  # whether there was a world before
        self.listeners: list[Callable[[], None]] = []

    def tell(self) -> None:
        """Tell all who listen that this process is in another job, or in none, by now."""
        for listener in self.listeners:
            listener()


_current = _Current()


def when_changed(listener: Callable[[], None]) -> None:
    """Have `listener` called each time that this process has joined or left its job, for as long as it lives.

    For what is built for one membership, and used where nobody can ask: by programs that were compiled, or by other
    processes.
    """
    _current.listeners.append(listener)


def init(settings: Settings | None = None, **changes: Any) -> Group:
    """Join the job, and return the group of all its ranks.

    Who this process is comes from what started it: `multiring run`, mpiexec, torchrun or srun; without any of them
    the job has one rank. Blocks until every rank has called it.

    In a multiprocessing worker of a rank it does nothing: `rank` and `size` return what they return in the rank, and
    collectives raise StateError.

    Args:
        settings: by default the environment's.
        changes: single settings by name that win over `settings`, such as `stall_timeout_s=20`.

    Raises:
        StateError: called twice without `shutdown` in between, in a fork of a rank, or in another process that has the
            variables of a rank which lives.
        RendezvousError: the ranks did not find each other; every rank that could be reached raises the same.
        ArgumentError: a setting or a launcher's variable makes no sense; the timeline it asks for cannot be written.
        LaunchError: the launcher's ranks cannot meet as things are; the text says what to set or install.
        UnsupportedError: another system than Linux on x86-64 or aarch64.
    """
    refuse_other_systems(platform.system(), platform.machine())
    chosen = (Settings.from_environment() if settings is None else settings).changed(**changes)
    with _current.lock:
        _current.worker = _worker_now()
        if _current.worker is not None:
            return cast("Group", WorkerGroup(_current.worker))
        _refuse_fork(_current.world)
        if _current.world is not None:
            raise StateError(
                "multiring.init() was called twice: this process has joined a job already, and is in it. Call it once; "
                "to leave this job and join one anew, call multiring.shutdown() first, on every rank"
            )
        attempt = Attempt(chosen)
        _current.worker = attempt.become_rank()
        if _current.worker is not None:
            return cast("Group", WorkerGroup(_current.worker))
        try:
            _current.world = _entered(chosen, None)
        except BaseException:
            attempt.give_up()
            raise
        attempt.mark(_current.world.place)
        group = _current.world.group
    _current.tell()
    return group


def enter(identity: Identity, settings: Settings, *, is_current: bool) -> World:
    """Join the job that `identity` says, as `init` does; with `is_current` it is this process's one from now on.

    Raises:
        StateError: `is_current`, and there is one; or in a fork of a rank.
        Others: as `init`.
    """
    refuse_other_systems(platform.system(), platform.machine())
    with _current.lock:
        for each in (_current.world, *_current.others):
            _refuse_fork(each)
        if is_current and _current.world is not None:
            raise StateError("multiring.init() was called already; call multiring.shutdown() first")
        world = _entered(settings, identity)
        if is_current:
            _current.world = world
            Attempt(settings).note(world.place)
        else:
            _current.others.append(world)
    if is_current:
        _current.tell()
    return world


def leave(world: World, *, grace_s: float | None = None) -> None:
    """Leave a job that `enter` joined, as `shutdown` does; nothing happens where it was left already.

    Args:
        world: the job.
        grace_s: how long operations in flight have; by default as with `shutdown`.
    """
    with _current.lock:
        if world is not _current.world and all(world is not each for each in _current.others):
            return
        is_current = world is _current.world
        if is_current:
            _current.world, _current.was_left = None, True
        _current.others = [each for each in _current.others if each is not world]
        if world.pid == os.getpid():
            world.close(world.settings.stall_warn_s if grace_s is None else grace_s, announce=True)
    if is_current:
        _current.tell()


def shutdown() -> None:
    """Leave the job. Arrays stay valid; groups and handles do not. Does nothing before `init`.

    Local: others may still be at work, and learn that this rank left only if they wait for it. Waits for operations in
    flight, at most MULTIRING_STALL_WARN_S; those that have not ended by then fail. With a timeline on, the ranks of one
    host wait for each other two seconds, and the last one to leave writes it. Ranks of several hosts write it together:
    they wait as long as for operations, at most 60 s, and stop waiting when another rank needs this one elsewhere.
    """
    with _current.lock:
        world = _current.world
        _current.world = None
        _current.was_left = _current.was_left or world is not None
        if world is not None and world.pid == os.getpid():
            world.close(world.settings.stall_warn_s, announce=True)
    if world is not None:
        _current.tell()


def current() -> World:
    """Return the world this process is in.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank.
    """
    world = _current.world
    if world is not None and world.pid == os.getpid():
        return world
    worker = _worker_now()
    if worker is not None:
        raise worker.refusal()
    _refuse_fork(world)
    raise StateError("multiring is not initialised; call multiring.init() first")


def place() -> RankPosition:
    """Return where this process is in its job; in a multiprocessing worker of a rank, where the rank is.

    Raises:
        StateError: before `init`, after `shutdown`, or in another fork of a rank.
    """
    worker = None if is_rank() else _worker_now()
    return current().place if worker is None else worker.place


def was_left() -> bool:
    """Return whether this process has left a job before."""
    return _current.was_left


def move_on(membership: Membership) -> World:
    """Have the job go on with these ranks, on the connections that there are; every one of them does the same.

    What asks for the job from now on, as `rank`, `size`, process sets and collectives of adapters do, is told of these.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank; the generation is not a later one.
    """
    with _current.lock:
        world = current()
        if membership.number <= world.membership.number:
            raise StateError(
                f"generation {membership.number} of the job: it is in {world.membership.number}; want a later one"
            )
        _current.world = world.in_generation(membership)
        Attempt(world.settings).note(_current.world.place)
        world = _current.world
    _current.tell()
    return world


def note_progress() -> None:
    """Tell the launcher, once, that the ranks have done something together that is worth starting anew for."""
    for world in (_current.world, *_current.others):
        if world is not None:
            world.news.tell(JobNews.PROGRESS)


def is_initialized() -> bool:
    """Return whether this process is in a job now, or is a multiprocessing worker of one that is."""
    return is_rank() or _worker_now() is not None


def is_rank() -> bool:
    """Return whether this process is in a job now, and communicates."""
    world = _current.world
    return world is not None and world.pid == os.getpid()


def _worker_now() -> Worker | None:
    """Return what this process is, where it is a multiprocessing worker of a rank."""
    world = _current.world
    if world is not None:
        return None if world.pid == os.getpid() else worker_here(world.rank_process)
    return _current.worker or worker_here(None)


def _refuse_fork(world: World | None) -> None:
    if world is not None and world.pid != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from rank {world.membership.rank} (process {world.pid}); "
            "only the rank itself may communicate"
        )


def _entered(settings: Settings, identity: Identity | None) -> World:
    """Return the world, which is left at the latest when the process ends; the lock is held."""
    withhold_secret()
    try:
        world = join_job(settings, identity)
    except BaseException:
        end_despite_mpi()
        raise
    if not _current.exit_handler_set:
        atexit.register(_leave_at_exit)
        _current.exit_handler_set = True
    return world


def _leave_at_exit() -> None:
    worlds = [world for world in (*_current.others, _current.world) if world is not None and world.pid == os.getpid()]
    _current.world, _current.others = None, []
    for world in worlds:
        # An uncaught error is no leave-taking: the other ranks are to hear that this one died.
        world.end(_EXIT_GRACE_S, announce=getattr(sys, "last_type", None) is None)

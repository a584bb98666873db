"""Join and leave jobs.

A process has at most one current World, which the public functions use.
"""

import atexit
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from multiring._forks import ForkSafeLock
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rank_process import RankPosition
from multiring._runtime.engines.mpi_library import end_despite_mpi
from multiring._runtime.failures.formation_place import FormationPlace
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.group.group import Group
from multiring._runtime.group.posting import ranks_in_words
from multiring._runtime.job.ending import ignore_handled_signals
from multiring._runtime.job.forming import alone, intake_of, is_newcomer, join_formation
from multiring._runtime.job.joining import join_job
from multiring._runtime.job.membership import Membership
from multiring._runtime.job.rank_or_worker import JoinAttempt, Worker, WorkerGroup, refuse_other_systems, worker_here
from multiring._runtime.job.world import World
from multiring._settings import JobNews, Settings, withhold_secret
from multiring.errors import PeerLostError, StateError

if TYPE_CHECKING:
    from multiring._runtime.failures.intake_channel import IntakeChannel

# Operations in flight get this long at exit. An operation that reports a wrong argument to other ranks needs this time.
_EXIT_GRACE_S = 2.0


class _Current:
    """The current World of this process, its other Worlds, and their lock."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.world: World | None = None
        self.intake: IntakeChannel | None = None  # set in a job that lets newcomers in
        self.is_outside = False  # whether this process is a newcomer, and is not let in yet
        self.worker: Worker | None = None  # set by `init` in a multiprocessing worker
        self.others: list[World] = []  # the Worlds that `enter` has joined without is_current
        self.exit_handler_set = False
        self.was_left = False  # whether this process has left a job before
        self.listeners: list[Callable[[], None]] = []

    def tell(self) -> None:
        """Call all listeners, after this process has joined or left its job."""
        for listener in self.listeners:
            listener()


_current = _Current()


def when_changed(listener: Callable[[], None]) -> None:
    """Call `listener` whenever this process has joined or left its job.

    The registration ends with the process. Use it for objects that depend on the membership but cannot check it at each
    use, because compiled programs or other processes use them.
    """
    _current.listeners.append(listener)


def init(settings: Settings | None = None, **changes: Any) -> Group:
    """Join the job and return the group of all its ranks.

    The launcher's variables determine this process's rank: those of `multiring run`, mpiexec, torchrun or srun. Without
    a launcher the job has one rank. The call blocks until every rank has called it.

    In a multiprocessing worker of a rank the call does nothing: `rank` and `size` return the values of the rank, and
    collectives raise StateError. In a process that has joined the job already, the call returns the same group; it
    takes no arguments then, or those that the job has.

    Args:
        settings: the settings; by default they are read from the environment.
        changes: single settings by name, such as `stall_timeout_s=20`. They override `settings`.

    Raises:
        StateError: this process is in a job with other settings, or in one that has lost a rank; or it is a fork of a
            rank; or another process than the rank has the launcher's variables of a rank that is still running.
        RendezvousError: the ranks did not find each other. Every reachable rank raises the same text.
        ArgumentError: a setting or a launcher's variable has an invalid value, or the timeline cannot be written.
        LaunchError: the ranks cannot meet with the launcher's variables; the text says what to set or install.
        UnsupportedError: the system is not Linux on x86-64 or aarch64.
    """
    refuse_other_systems(platform.system(), platform.machine())
    with _current.lock:
        _current.worker = _worker_now()
        if _current.worker is not None:
            return cast("Group", WorkerGroup(_current.worker))
        _refuse_fork(_current.world)
        if _current.world is not None:
            _require_same(_current.world.settings, settings, changes)
            _require_no_loss(_current.world)
            return _current.world.group
        chosen = (Settings.from_environment() if settings is None else settings).changed(**changes)
        attempt = JoinAttempt(chosen)
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


def _require_no_loss(world: World) -> None:
    """Raise StateError if a rank of the job is lost, so that the job's group cannot be used."""
    losses = world.context.losses()
    if lost := [rank for rank, number in enumerate(world.membership.ids) if number in losses]:
        error = StateError(
            f"multiring.init: this process is in a job that has lost {ranks_in_words(lost)}, so its group cannot be "
            "used: call multiring.shutdown() first, on every rank that is left"
        )
        raise error from PeerLostError(f"{ranks_in_words(lost)}: lost")  # launchers look for the rank that failed first


def _require_same(joined: Settings, settings: Settings | None, changes: dict[str, Any]) -> None:
    """Raise StateError if the arguments of `init` ask for other settings than this process's job has.

    Args:
        joined: the settings of the job.
        settings: see `init`.
        changes: see `init`.
    """
    wanted = (joined if settings is None else settings).changed(**changes)
    names = [each.name for each in fields(Settings) if getattr(wanted, each.name) != getattr(joined, each.name)]
    if names:
        asked, has = (", ".join(_shown(each, name) for name in names) for each in (wanted, joined))
        raise StateError(
            f"multiring.init({asked}): this process is already in a job, which has {has}. Call init once, or with the "
            "same settings; to leave this job and join another, call multiring.shutdown() first, on every rank"
        )


def _shown(settings: Settings, name: str) -> str:
    return f"{name}=..." if name == "secret" else f"{name}={getattr(settings, name)!r}"


def enter(identity: Identity, settings: Settings, *, is_current: bool) -> World:
    """Join the job of `identity`, as `init` does.

    Args:
        identity: the rank to join as, and the rendezvous.
        settings: the settings of the job.
        is_current: whether the job becomes this process's current job, which the public functions use.

    Raises:
        StateError: `is_current` is set, and this process has a current job; or this process is a fork of a rank.
        Others: as for `init`.
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
            JoinAttempt(settings).note(world.place)
        else:
            _current.others.append(world)
    if is_current:
        _current.tell()
    return world


def leave(world: World, *, grace_s: float | None = None) -> None:
    """Leave a job that `enter` has joined, as `shutdown` does.

    A second call does nothing.

    Args:
        world: the job to leave.
        grace_s: the seconds that operations in flight may take to end; by default as for `shutdown`.
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
    """Leave the job.

    Arrays stay valid; groups and handles become invalid. Before `init` the call does nothing. The call is local: other
    ranks may continue, and get an error only if they wait for this rank. The call waits at most MULTIRING_STALL_WARN_S
    seconds for operations in flight; operations that have not ended by then fail.

    If a timeline is being recorded and all ranks are on one host, the ranks wait two seconds for each other, and the
    last rank to leave writes the file. Ranks on several hosts write the file together. Each of them waits up to
    MULTIRING_STALL_WARN_S, at most 60 s, and stops waiting if another rank waits for it in another operation.

    In a part of the job (`in_part`) the call does nothing: the ranks leave the part at its end, and stay in the job.
    """
    with _current.lock:
        world = _current.world
        if world is not None and world.whole is not None:
            return
        _current.world = None
        _current.was_left = _current.was_left or world is not None
        if world is not None and world.pid == os.getpid():
            world.close(world.settings.stall_warn_s, announce=True)
    if world is not None:
        _current.tell()


def current() -> World:
    """Return this process's current World.

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
    """Return this process's numbers in its job.

    In a multiprocessing worker of a rank, they are those of the rank.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank that is not such a worker.
    """
    worker = None if is_rank() else _worker_now()
    return current().place if worker is None else worker.place


def was_left() -> bool:
    """Return whether this process has left a job before."""
    return _current.was_left


def move_on(membership: Membership) -> World:
    """Continue the job with the ranks of a later generation.

    The existing connections are used. Every rank of the new generation must make the same call. From now on `rank`,
    `size`, process sets and the adapters' collectives use the new ranks.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank; or the generation is not a later one.
    """
    with _current.lock:
        world = current()
        if membership.number <= world.membership.number:
            raise StateError(
                f"generation {membership.number}: want one after the job's generation {world.membership.number}"
            )
        _current.world = world.in_generation(membership)
        JoinAttempt(world.settings).note(_current.world.place)
        world = _current.world
    _current.tell()
    return world


@contextmanager
def in_part(membership: Membership, end: GenerationEnd) -> Iterator[World]:
    """Make some ranks of the job a job of their own inside the block.

    There `rank`, `size`, process sets and the adapters' collectives use the part's ranks. `local_rank` and `local_size`
    stay those of the whole job, because programs choose their devices by them. Every rank of the part must enter it.

    Args:
        membership: see `World.part`.
        end: see `World.part`.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank.
    """
    with _current.lock:
        outer = current()
        part = _current.world = outer.part(membership, end)
        JoinAttempt(outer.settings).note(part.place)
    _current.tell()
    try:
        yield part
    finally:
        with _current.lock:
            if _current.world is part:
                _current.world = outer
                JoinAttempt(outer.settings).note(outer.place)
        _current.tell()


def may_go_on() -> bool:
    """Return whether this process's job goes on without lost ranks, by `succeed`."""
    return is_rank() and current().vote is not None


def succeed() -> World:
    """Agree with the other ranks on who is left, and continue the job with them.

    The call is for a job in which an operation failed. Every rank that is left makes it. It returns once the ranks that
    are left out have ended, so that none of them writes to this rank's memory any more.

    Raises:
        StateError: before `init`, or the launcher did not start the job with --min-ranks; or the ranks that are left
            cannot go on, because too few are left, no majority answers, or the others have gone on without this rank.
    """
    world = current()
    if world.vote is None:
        raise StateError("this job does not go on without lost ranks: start it by `multiring run --min-ranks K`")
    members = world.membership
    number, left = world.vote.succeed(members.number, members.ids)
    return move_on(members.following(number, left))


def lets_in() -> bool:
    """Return whether this process is in a job that lets newcomers in."""
    return is_rank() and _current.intake is not None


def waits_outside() -> bool:
    """Return whether this process is a newcomer that the ranks have not let in yet: it is alone in its job."""
    return is_rank() and _current.is_outside


def newcomers() -> int:
    """Return how many newcomers wait. Every rank calls it after each commit."""
    if not lets_in() or _current.intake is None:
        return 0
    _current.intake.note_commit(current().membership.number)
    return _current.intake.newcomers


def let_in(told: str) -> tuple[int | None, ...]:
    """Let the newcomers in that wait, and continue the job with them.

    Every rank that is left makes the call, at the same commit. All connections and all shared memory are made anew.
    New ranks follow the others.

    Args:
        told: a line of text for the newcomers; the same on all ranks.

    Returns:
        By new rank, the process's number in the native core until now; None for a newcomer. If the launcher has let
        nobody in, because a rank was lost meanwhile, or has not come, the ranks continue as by `succeed`; then the
        numbers that the processes keep.

    Raises:
        StateError: the job lets nobody in, or the launcher does not answer; or as for `succeed`.
    """
    world, intake = current(), _current.intake
    if intake is None:
        raise StateError("this job lets no newcomers in: start it by `multiring run --min-ranks K --max-ranks N`")
    place = intake.come(world.membership.number, told)
    if place is None:
        return succeed().membership.ids if may_go_on() else world.membership.ids
    return _move_to(place).former


def come_in() -> FormationPlace:
    """Wait until the ranks let this newcomer in, and continue in their job.

    Raises:
        StateError: this process does not wait outside, or the launcher does not answer.
    """
    intake = _current.intake
    if intake is None or not waits_outside():
        raise StateError("this process is no newcomer that waits")
    place = _move_to(intake.place())
    _current.is_outside = False
    return place


def _move_to(place: FormationPlace) -> FormationPlace:
    """Leave the present job, and find the others of a formation; return the place in it."""
    with _current.lock:
        world, intake = current(), _current.intake
        if intake is None:
            raise StateError("this job lets no newcomers in")
        world.close(0.0, announce=True)
        _current.world, _current.was_left = None, True
        try:
            world, place = join_formation(world.settings, intake, place)
        except BaseException:
            end_despite_mpi()
            raise
        _current.world = world
        JoinAttempt(world.settings).note(world.place)
    _current.tell()
    return place


def note_progress() -> None:
    """Report to the launcher, once, that the ranks have made progress.

    The launcher may then restart the job after a failure.
    """
    for world in (_current.world, *_current.others):
        if world is not None:
            world.news.tell(JobNews.PROGRESS)


def is_initialized() -> bool:
    """Return whether this process is in a job, or is a worker of a rank.

    A worker is a process that the rank started by multiprocessing.
    """
    return is_rank() or _worker_now() is not None


def is_rank() -> bool:
    """Return whether this process is a rank of a job now."""
    world = _current.world
    return world is not None and world.pid == os.getpid()


def _worker_now() -> Worker | None:
    """Return this process as a Worker if it is a worker of a rank, else None.

    A worker is a process that the rank started by multiprocessing.
    """
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
    """Join a job, and arrange that it is left when the process ends.

    The caller holds the lock.
    """
    withhold_secret()
    try:
        world = join_job(settings, identity) if identity is not None else _joined(settings)
    except BaseException:
        end_despite_mpi()
        raise
    if not _current.exit_handler_set:
        atexit.register(_leave_at_exit)
        _current.exit_handler_set = True
    return world


def _joined(settings: Settings) -> World:
    """Join the job of the launcher's variables. A newcomer is alone until the ranks let it in."""
    intake = _current.intake = _current.intake or intake_of(settings)
    _current.is_outside = intake is not None and is_newcomer(settings)
    return join_job(settings, alone(settings) if _current.is_outside else None)


def _leave_at_exit() -> None:
    worlds = [world for world in (*_current.others, _current.world) if world is not None and world.pid == os.getpid()]
    _current.world, _current.others = None, []
    try:
        for world in worlds:
            # After an uncaught exception, this rank does not announce its departure: the others must detect that it
            # died.
            world.end(_EXIT_GRACE_S, announce=getattr(sys, "last_type", None) is None)
    finally:
        ignore_handled_signals()

"""The world: one process's membership of its job, from `init` to `shutdown`."""

import atexit
import hashlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from multiring._native import Context, ContextConfig, Holdings
from multiring.errors import LaunchError, RendezvousError, StateError, UnsupportedError
from multiring.planner import Pins
from multiring.runtime.bootstrap.addresses import host_id
from multiring.runtime.bootstrap.launchers import Identity, identify
from multiring.runtime.bootstrap.open_files import make_room_for_files
from multiring.runtime.bootstrap.rendezvous import Rendezvous
from multiring.runtime.engines.mpi import MpiEngine, MpiHere, check_engines
from multiring.runtime.engines.mpi_library import end_despite_mpi
from multiring.runtime.events import Event, event_of
from multiring.runtime.failures.control_thread import Control
from multiring.runtime.failures.rank_status import RankStatus
from multiring.runtime.group.group import Group
from multiring.runtime.group.handles import NOBODY
from multiring.runtime.group.plan_file import read_pins
from multiring.runtime.group.posting import Membership, ranks_in_words
from multiring.runtime.job.launcher_news import LauncherNews
from multiring.runtime.rails.select import Place, RailWatch, agreed_rails, chosen_rails, topology_with
from multiring.runtime.rails.topology_file import read_topology
from multiring.runtime.tracing.timeline import Timelines
from multiring.settings import TIMELINE_LATER, JobNews, Settings, foreign_environment, withhold_secret
from multiring.topology import Topology, grid_of, neighbours
from multiring.trace import Glossary

# A rank may need a connection on each of a few rails to every other, and what tells of its end.
_FILES_A_RANK, _OTHER_FILES = 4, 1024
# A caller spins this long before it sleeps, and only where every local rank can have a core of its own
# (docs/decisions/0004-one-host.md).
_log = logging.getLogger("multiring")
_SPIN_S = 1e-3
# At exit, operations in flight get this long: those that tell others of a wrong argument need it.
_EXIT_GRACE_S = 2.0
_SIGNAL_CHECK_S = 0.2  # longest time between two looks for Ctrl-C
_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A job's ranks as this process sees them, and what carries its bytes."""

    identity: Identity
    settings: Settings
    context: Context
    engine: MpiEngine | None  # where MPI carries bytes between hosts
    group: Group
    local_rank: int
    local_size: int
    pid: int
    rail_watch: RailWatch | None  # where there is more than one
    control: Control | None  # where there are other ranks
    timelines: Timelines
    news: LauncherNews

    def take_events(self) -> list[Event]:
        """Return what was recorded since the last call, oldest first; at most 65,536 are kept in between."""
        return [event_of(raw, self.identity.rank) for raw in self.context.take_events()]

    def close(self, grace_s: float, *, announce: bool) -> None:
        """Leave the job once what is in flight has ended, after `grace_s` in any case. Ctrl-C ends the waiting."""
        patience_s = self.settings.stall_warn_s if announce else grace_s
        try:
            # The others do not wait for the timeline of one that fails by itself: they do not know yet.
            self.timelines.close(patience_s, is_wanted=announce or self.context.has_failed())
        finally:
            self._leave(grace_s, announce=announce)

    def _leave(self, grace_s: float, *, announce: bool) -> None:
        deadline = time.monotonic() + grace_s
        if self.rail_watch is not None:
            self.rail_watch.stop()
        try:
            while not self.context.settled(_SIGNAL_CHECK_S) and time.monotonic() < deadline:
                pass
        finally:
            self.context.close(0.5, announce)
            if self.control is not None:
                self.control.stop()
            if self.engine is not None:
                self.engine.stop()
            if not announce or self.context.has_failed():
                end_despite_mpi()


class _Current:
    """The process's one world at a time, and the lock that keeps it one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: World | None = None
        self.others: list[World] = []  # that are nobody's `current`
        self.exit_handler_set = False


_current = _Current()


def init(settings: Settings | None = None, **changes: Any) -> Group:
    """Join the job, and return the group of all its ranks.

    Who this process is comes from what started it: `multiring run`, mpiexec, torchrun or srun; without any of them
    the job has one rank. Blocks until every rank has called it.

    Args:
        settings: by default the environment's.
        changes: single settings by name that win over `settings`, such as `stall_timeout_s=20`.

    Raises:
        StateError: called twice without `shutdown` in between, or in a fork of a rank.
        RendezvousError: the ranks did not find each other; every rank that could be reached raises the same.
        ArgumentError: a setting or a launcher's variable makes no sense; the timeline it asks for cannot be written.
        LaunchError: the launcher's ranks cannot meet as things are; the text says what to set or install.
        UnsupportedError: another system than Linux on x86-64 or aarch64.
    """
    refuse_other_systems(platform.system(), platform.machine())
    chosen = (Settings.from_environment() if settings is None else settings).changed(**changes)
    with _current.lock:
        _refuse_fork(_current.world)
        if _current.world is not None:
            raise StateError("multiring.init() was called twice; call multiring.shutdown() in between")
        _current.world = _entered(chosen, None)
        return _current.world.group


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
        else:
            _current.others.append(world)
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
        if world is _current.world:
            _current.world = None
        _current.others = [each for each in _current.others if each is not world]
        if world.pid == os.getpid():
            world.close(world.settings.stall_warn_s if grace_s is None else grace_s, announce=True)


def shutdown() -> None:
    """Leave the job. Arrays stay valid; groups and handles do not. Does nothing before `init`.

    Local: others may still be at work, and learn that this rank left only if they wait for it. Waits for operations in
    flight, at most MULTIRING_STALL_WARN_S; those that have not ended by then fail. With a timeline on, the ranks first
    write it together, and wait as long for each other.
    """
    with _current.lock:
        world = _current.world
        _current.world = None
        if world is not None and world.pid == os.getpid():
            world.close(world.settings.stall_warn_s, announce=True)


def current() -> World:
    """Return the world this process is in.

    Raises:
        StateError: before `init`, after `shutdown`, or in a fork of a rank.
    """
    world = _current.world
    if world is None:
        raise StateError("multiring is not initialised; call multiring.init() first")
    _refuse_fork(world)
    return world


def note_progress() -> None:
    """Tell the launcher, once, that the ranks have done something together that is worth starting anew for."""
    for world in (_current.world, *_current.others):
        if world is not None:
            world.news.tell(JobNews.PROGRESS)


def is_initialized() -> bool:
    """Return whether this process is in a job now."""
    world = _current.world
    return world is not None and world.pid == os.getpid()


def refuse_other_systems(system: str, machine: str) -> None:
    """Raise UnsupportedError unless multiring runs on this system and processor."""
    if system != "Linux" or machine not in _MACHINES:
        raise UnsupportedError(f"multiring runs on Linux, x86-64 or aarch64; this is {system} on {machine}")


def _refuse_fork(world: World | None) -> None:
    if world is not None and world.pid != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from rank {world.identity.rank} (process {world.pid}); "
            "only the rank itself may communicate"
        )


def _entered(settings: Settings, identity: Identity | None) -> World:
    """Return the world, which is left at the latest when the process ends; the lock is held."""
    withhold_secret()
    try:
        world = _begin(settings, identity)
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
        world.close(_EXIT_GRACE_S, announce=getattr(sys, "last_type", None) is None)


def _begin(settings: Settings, identity: Identity | None) -> World:
    """Return the world, with its timeline on where rank 0's settings want one."""
    known = identity or identify(settings, foreign_environment())
    make_room_for_files(_FILES_A_RANK * known.size + _OTHER_FILES)
    world, timeline = _join(settings, known)
    world.news.tell(JobNews.MET)
    if timeline["path"]:
        try:
            world.timelines.start(**timeline)
        except BaseException:
            world.close(0.0, announce=True)
            raise
    return world


def _join(settings: Settings, identity: Identity) -> tuple[World, dict[str, Any]]:
    # And what rank 0 wants of a timeline.
    with Rendezvous(identity, timeout_s=settings.init_timeout_s) as meeting:
        mpi = MpiHere.find(identity) if settings.engine == "mpi" and identity.size > 1 else None
        context = Context(
            ContextConfig(
                rank=identity.rank,
                size=identity.size,
                job=identity.job.encode(),
                secret=meeting.secret(),
                segment_bytes=settings.segment_bytes,
                stall_warn_s=settings.stall_warn_s,
                stall_timeout_s=settings.stall_timeout_s,
                log_moves=settings.log_moves,
                lower=settings.lower,
                read_peers=settings.read_peers,
                by_mpi=mpi is not None,
                rail_timeout_s=settings.rail_timeout_s,
                wire_timeout_s=settings.wire_timeout_s,
            )
        )
        engine = None
        try:
            host = f"{host_id()} rank {identity.rank}" if settings.engine == "tcp" else host_id()
            cores = sorted(os.sched_getaffinity(0))
            known = None if settings.topology is None else read_topology(settings.topology)
            peer_info = {"host": host, "name": os.uname().nodename, "handover": context.handover_name, "cores": cores}
            pins = None if settings.plan is None else read_pins(settings.plan)
            files = {"topology": _digest_of(known), "plan": _digest_of(pins)}
            engines = {"engine": settings.engine, "mpi": mpi and mpi.peer_info}
            peer_infos = meeting.exchange({**peer_info, **files, **engines, **_wishes(settings)})
            _refuse_other_files(peer_infos)
            check_engines(peer_infos)
            _refuse_other_replan(peer_infos)
            hosts = _hosts_for(settings.engine, [peer_info["host"] for peer_info in peer_infos])
            topology = _topology(known, hosts, peer_infos)
            local_ranks = next(ranks for ranks in hosts if identity.rank in ranks)
            rails: list[list[Place]] = [[] for _ in peer_infos]
            if len(hosts) > 1:
                told = meeting.exchange({"rails": _listen(context, identity, settings, known)})
                rails = agreed_rails([peer_info["rails"] for peer_info in told])
                topology = topology_with(topology, rails)
            if pins is not None:
                pins.refuse_other(topology)
            grid, order = grid_of(topology)
            places = _places(topology)
            peers = [
                (rank, rank in local_ranks, peer_info["handover"], [place.end for place in rails[rank]], places[rank])
                for rank, peer_info in enumerate(peer_infos)
                if rank != identity.rank
            ]
            near = neighbours(grid, order, identity.rank)
            meeting.agree(*_connect(context, peers, (local_ranks, near), settings.init_timeout_s, meeting))
            if mpi is not None and len(hosts) > 1:
                engine = mpi.start(
                    context, meeting, [peer_info["mpi"] for peer_info in peer_infos], settings.init_timeout_s
                )
            _say_how_memory_moves(context, identity.rank, local_ranks)
            context.allow_spin(spin_s := _spin_s([peer_infos[rank]["cores"] for rank in local_ranks]))
        except BaseException:
            context.close(0.0, False)
            raise
    watch = RailWatch(context, identity.rank, rails, topology) if len(rails[identity.rank]) > 1 else None
    carriers = context, engine, watch
    return _world(identity, settings, carriers, (topology, pins, spin_s), local_ranks), peer_infos[0]["timeline"]


def _places(topology: Topology) -> dict[int, str]:
    """Return for each rank the host it is on, and who else is."""
    hosts = zip(topology.names, topology.hosts, strict=True)
    return {rank: f"{name} ({ranks_in_words(ranks)})" for name, ranks in hosts for rank in ranks}


def _wishes(settings: Settings) -> dict[str, Any]:
    """Return whether plans may change, and the arguments of `Timelines.start`: the path is "" where none starts."""
    path = "" if settings.timeline in (None, TIMELINE_LATER) else settings.timeline
    marks = {"mark_cycles": settings.timeline_mark_cycles, "preview": settings.timeline_preview}
    return {"replan": settings.replan, "timeline": {"path": path, **marks}}


def _connect(
    context: Context,
    peers: list[tuple[int, bool, str, list[tuple[str, int]], str]],
    near: tuple[Sequence[int], Sequence[int]],
    timeout_s: float,
    meeting: Rendezvous,
) -> tuple[str | None, float]:
    """Connect with this host's ranks and the neighbours, `near`; return what went wrong, and when it began."""
    began = time.monotonic()
    try:
        if context.connect(peers, list(near[0]), list(near[1]), timeout_s, meeting.disturbed):
            return None, began
    except (OSError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {failure}", began
    return "it gave up connecting because another rank had failed", began


def _spin_s(cores: Sequence[Sequence[int]]) -> float:
    """Return how long callers may spin: where every rank of this host can have one of `cores`, theirs, for itself."""
    return _SPIN_S if len(set(chain.from_iterable(cores))) >= len(cores) else 0.0


def _say_how_memory_moves(context: Context, own: int, local_ranks: tuple[int, ...]) -> None:
    """Log by which way each rank of this host gets what lies in this rank's ordinary memory."""
    readers = set(context.read_by())  # each has tried before it said that it is connected
    others = [rank for rank in local_ranks if rank != own]
    in_place = [rank for rank in others if rank in readers]
    through = [rank for rank in others if rank not in readers]
    if others:
        _log.info(
            "rank %d: large ordinary arrays are read in place by ranks %s, through segments by %s",
            own,
            in_place,
            through,
        )


def _world(
    identity: Identity,
    settings: Settings,
    carriers: tuple[Context, MpiEngine | None, RailWatch | None],
    place: tuple[Topology, Pins | None, float],
    local_ranks: tuple[int, ...],
) -> World:
    context, engine, rail_watch = carriers
    control = Control(context) if identity.size > 1 else None
    if rail_watch is not None:
        rail_watch.start()
    glossary = Glossary()
    membership = Membership(
        context=context,
        holdings=Holdings(context),
        world_rank=identity.rank,
        stall_warn_s=settings.stall_warn_s,
        stall_timeout_s=settings.stall_timeout_s,
        lookout=NOBODY if control is None else RankStatus(control, identity.rank, settings.stall_warn_s),
        control=control,
        glossary=glossary,
        pins=place[1],
        replan=settings.replan,
        spin_s=place[2],
    )
    if control is not None:
        control.start()

    def group_named(name: str) -> Group:
        key = hashlib.blake2b(f"{name}|{identity.job}".encode(), digest_size=16).digest()
        return Group(membership, tuple(range(identity.size)), place[0], key)

    return World(
        identity=identity,
        settings=settings,
        context=context,
        engine=engine,
        group=group_named("world"),
        local_rank=local_ranks.index(identity.rank),
        local_size=len(local_ranks),
        pid=os.getpid(),
        rail_watch=rail_watch,
        control=control,
        timelines=Timelines(identity, context, glossary, group_named),
        news=LauncherNews(identity.rank, settings.rendezvous or identity.rendezvous),
    )


def _digest_of(value: Topology | Pins | None) -> str:
    """Return what is equal for equal values; "" for none."""
    return "" if value is None else hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _refuse_other_files(peer_infos: list[dict[str, Any]]) -> None:
    for file in ("topology", "plan"):
        _refuse_unlike(peer_infos, file)


def _refuse_unlike(peer_infos: list[dict[str, Any]], file: str) -> None:
    """Raise RendezvousError unless all ranks have the same topology file, or plan file, or none."""
    camps: dict[str, list[int]] = {}
    for rank, peer_info in enumerate(peer_infos):
        camps.setdefault(peer_info[file], []).append(rank)
    if len(camps) > 1:
        held = [f"{f'file {digest[:8]}' if digest else 'no file'} on ranks {ranks}" for digest, ranks in camps.items()]
        raise RendezvousError(
            f"ranks have different {file} files: {'; '.join(held)}; "
            f"set MULTIRING_{file.upper()} to the same file everywhere"
        )


def _refuse_other_replan(peer_infos: list[dict[str, Any]]) -> None:
    """Raise RendezvousError unless all ranks plan again, or none does."""
    without = [rank for rank, peer_info in enumerate(peer_infos) if not peer_info["replan"]]
    if without and len(without) < len(peer_infos):
        raise RendezvousError(
            f"ranks {without} have MULTIRING_REPLAN=0, the others have not; set it to the same everywhere"
        )


def _topology(known: Topology | None, hosts: tuple[tuple[int, ...], ...], peer_infos: list[dict[str, Any]]) -> Topology:
    """Return where the ranks are: `known`, from a file, with what the ranks told of themselves, or that alone."""
    names = tuple(peer_infos[ranks[0]]["name"] for ranks in hosts)
    return Topology(hosts, names=names) if known is None else known.placed(hosts, names)


def _hosts_for(engine: str, names: list[str]) -> tuple[tuple[int, ...], ...]:
    hosts = hosts_of(names)
    if engine == "shm" and len(hosts) > 1:
        raise LaunchError(f"MULTIRING_ENGINE=shm, but the ranks are on {len(hosts)} hosts: {hosts}; want auto")
    return hosts


def hosts_of(names: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, hosts in the order of their first rank; `names` has each rank's host."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def _listen(context: Context, identity: Identity, settings: Settings, known: Topology | None) -> list[Place]:
    # Ranks that met at an abstract socket are on one machine, and then nobody else is to reach them.
    first, last = settings.ports or (0, 0)
    return [
        Place(rail.interface, address, context.listen(address, first, last), rail.bits_per_s)
        for rail, address in chosen_rails(settings, known, met_locally=identity.rendezvous.startswith("@"))
    ]

"""Join a job: the ranks meet, exchange peer infos, and connect to each other."""

import errno
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from multiring._limits.processes import limits_told
from multiring._native import Context, ContextConfig, Holdings, load_crypto
from multiring._runtime.bootstrap.addresses import host_id, network_id
from multiring._runtime.bootstrap.identity import Identity, naming, sealing_as
from multiring._runtime.bootstrap.launchers import identify
from multiring._runtime.bootstrap.open_files import make_room_for_files, refuse_small_limits
from multiring._runtime.bootstrap.rank_process import spawner
from multiring._runtime.bootstrap.rendezvous import Rendezvous
from multiring._runtime.bootstrap.waiting_lines import WaitingLines
from multiring._runtime.engines.mpi import MpiEngine, MpiHere, check_engines
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.failures.generation_vote import GenerationVote, VotingProcesses
from multiring._runtime.failures.launcher_channel import LauncherChannel, proof_of
from multiring._runtime.failures.rank_status import RankStatus
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.group.handles import NOBODY
from multiring._runtime.group.plan_file import read_pins
from multiring._runtime.group.posting import ProcessServices, ranks_in_words
from multiring._runtime.job.launcher_news import LauncherNews
from multiring._runtime.job.membership import Endpoint, Membership
from multiring._runtime.job.world import World, group_named
from multiring._runtime.rails import reach
from multiring._runtime.rails.connections import agreed_connections, connection_wish
from multiring._runtime.rails.select import RailEndpoint, RailWatch, agreed_rails, chosen_rails, topology_with
from multiring._runtime.rails.topology_file import read_topology
from multiring._runtime.tracing.event_log import EventLog
from multiring._runtime.tracing.step_reporter import StepReporter
from multiring._runtime.tracing.timeline import Timelines
from multiring._settings import TIMELINE_LATER, JobNews, Settings, foreign_environment, vote_address
from multiring._steps.step_counters import STEPS
from multiring._topology import Topology, grid_of, neighbours
from multiring.errors import ArgumentError, LaunchError, RendezvousError
from multiring.planner import Pins
from multiring.trace import Glossary, TakenError

# A rank may need a connection to every other rank on each of a few rails, and a descriptor that signals the end of the
# other rank.
_FILES_A_RANK, _OTHER_FILES = 4, 1024
_log = logging.getLogger("multiring")
# A caller spins this long before it sleeps, but only if every local rank can have a core of its own
# (docs/decisions/0004-one-host.md).
_SPIN_S = 1e-3


def join_job(settings: Settings, identity: Identity | None) -> World:
    """Wait until all ranks have come, and connect them.

    If rank 0's settings ask for a timeline, it is started.
    """
    began = time.monotonic()  # the time-out includes the time to find the address
    known = identity or identify(settings, foreign_environment())
    try:
        return _join_as(sealing_as(settings, known), settings, began)
    finally:
        known.stop_telling()  # all ranks have met, or they never will


def _join_as(known: Identity, settings: Settings, began: float) -> World:
    make_room_for_files(_FILES_A_RANK * known.size + _OTHER_FILES)
    news = LauncherNews(known.rank, settings.reports)
    news.tell_joining()
    refuse_small_limits(settings.segment_bytes)
    try:
        world, timeline = _join(settings, known, news, began)
    except RendezvousError:
        news.tell_lost(-1)
        raise
    world.news.tell(JobNews.MET)
    if timeline["path"]:
        try:
            with naming("MULTIRING_TIMELINE"):
                world.timelines.start(**timeline)
        except TakenError as error:
            if known.rank == 0:  # only rank 0 logs that the job starts without a timeline
                _log.warning("no timeline of this job is recorded: %s", error)
        except BaseException:
            world.close(0.0, announce=True)
            raise
    return world


def _join(settings: Settings, identity: Identity, news: LauncherNews, began: float) -> tuple[World, dict[str, Any]]:
    # Also returns rank 0's settings for a timeline.
    with Rendezvous(identity, timeout_s=settings.init_timeout_s, began=began) as rendezvous:
        mpi = MpiHere.find(identity) if settings.engine == "mpi" and identity.size > 1 else None
        context = _context(settings, identity, rendezvous.secret(), by_mpi=mpi is not None)
        engine = None
        try:
            host = f"{host_id()} rank {identity.rank}" if settings.engine == "tcp" else host_id()
            cores = sorted(os.sched_getaffinity(0))
            known, pins = _files_of(settings)
            peer_info = {"host": host, "handover": context.handover_name, "cores": cores, **_process()}
            files = {"topology": _digest_of(settings.topology), "plan": _digest_of(settings.plan)}
            engines = {"engine": settings.engine, "mpi": mpi and mpi.peer_info}
            peer_infos = rendezvous.exchange({**peer_info, **files, **engines, **_wishes(settings)})
            # All ranks have met, and cannot be in their next `init` yet: that must not find this one's address.
            identity.stop_telling()
            _refuse_other_files(peer_infos)
            check_engines(peer_infos)
            _refuse_other_replan(peer_infos)
            hosts = _hosts_for(settings.engine, [peer_info["host"] for peer_info in peer_infos])
            topology = _topology(known, hosts, peer_infos)
            local_ranks = next(ranks for ranks in hosts if identity.rank in ranks)
            rails: list[list[RailEndpoint]] = [[] for _ in peer_infos]
            if len(hosts) > 1:
                wish = connection_wish(settings, known, [peer_infos[rank]["cores"] for rank in local_ranks])
                rails = _agree(context, rendezvous, _listen(context, identity, settings, known), wish)
                reach.refuse_shared_addresses(peer_infos, rails)
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
            rendezvous.agree(_connect(context, peers, (local_ranks, near), rendezvous))
            if mpi is not None and len(hosts) > 1:
                engine = mpi.start(context, rendezvous, [peer_info["mpi"] for peer_info in peer_infos])
            _say_how_memory_moves(context, identity.rank, local_ranks)
            context.allow_spin(spin_s := _spin_s([peer_infos[rank]["cores"] for rank in local_ranks]))
        except BaseException:
            context.close(0.0, False)
            raise
    watch = RailWatch(context, identity.rank, rails, topology) if len(rails[identity.rank]) > 1 else None
    return _world(
        (identity, settings, news),
        _membership(identity, peer_infos, topology),
        (context, engine, watch),
        (pins, spin_s),
        (_siblings(peer_infos, identity.rank), _pids_here(peer_infos)),
    ), peer_infos[0]["timeline"]


def _context(settings: Settings, identity: Identity, secret: bytes, *, by_mpi: bool) -> Context:
    """Return this rank's context of the native core."""
    if settings.seal:
        load_crypto(settings.seal_library or "")
    config = ContextConfig(
        rank=identity.rank,
        size=identity.size,
        job=identity.job.encode(),
        secret=secret,
        segment_bytes=settings.segment_bytes,
        stall_warn_s=settings.stall_warn_s,
        stall_timeout_s=settings.stall_timeout_s,
        log_moves=settings.log_moves,
        lower=settings.lower,
        read_peers=settings.read_peers,
        by_mpi=by_mpi,
        rail_timeout_s=settings.rail_timeout_s,
        wire_timeout_s=settings.wire_timeout_s,
        seal=settings.seal,
    )
    if settings.min_ranks is not None and settings.reports is not None:  # otherwise there is no launcher for votes
        config.own_losses_only = True
    try:
        return Context(config)
    except ArgumentError as error:
        rounded, comma, wanted = str(error).partition(", want ")
        if not comma or not rounded.startswith("MULTIRING_SEGMENT_BYTES"):
            raise
        raise ArgumentError(f"MULTIRING_SEGMENT_BYTES={settings.segment_bytes}: want {wanted} bytes") from None
    except RuntimeError as error:
        if str(error) != os.strerror(errno.EAGAIN):  # what std::thread says if the kernel refuses a thread
            raise
        raise LaunchError(f"rank {identity.rank} cannot start a thread ({error}){limits_told()}") from None


def _membership(identity: Identity, peer_infos: list[dict[str, Any]], topology: Topology) -> Membership:
    """Return the first generation of the job."""
    endpoints = tuple(Endpoint(number, peer_info["name"]) for number, peer_info in enumerate(peer_infos))
    return Membership(job=identity.job, number=0, rank=identity.rank, endpoints=endpoints, topology=topology)


def _process() -> dict[str, Any]:
    return {"name": os.uname().nodename, "network": network_id(), "pid": os.getpid(), "spawner": spawner()}


def _siblings(peer_infos: list[dict[str, Any]], own: int) -> dict[int, int]:
    """Return the pids of this rank's siblings, by rank.

    Siblings are ranks that the same process started by multiprocessing.
    """
    own_spawner = peer_infos[own]["spawner"]
    same = [rank for rank, peer_info in enumerate(peer_infos) if own_spawner and peer_info["spawner"] == own_spawner]
    return {rank: int(peer_infos[rank]["pid"]) for rank in same if rank != own}


def _pids_here(peer_infos: list[dict[str, Any]]) -> dict[int, int]:
    """Return the pids of this host's ranks, by rank, also if the ranks talk to each other as if on several hosts."""
    own = host_id()
    return {
        rank: int(peer_info["pid"])
        for rank, peer_info in enumerate(peer_infos)
        if peer_info["host"] in (own, f"{own} rank {rank}")
    }


def _places(topology: Topology) -> dict[int, str]:
    """Return, for each rank, a text with its host and the host's ranks."""
    hosts = zip(topology.names, topology.hosts, strict=True)
    return {rank: f"{name} ({ranks_in_words(ranks)})" for name, ranks in hosts for rank in ranks}


def _wishes(settings: Settings) -> dict[str, Any]:
    """Return whether plans may change, and the arguments of `Timelines.start`.

    An empty path starts no timeline.
    """
    path = "" if settings.timeline in (None, TIMELINE_LATER) else settings.timeline
    marks = {"mark_cycles": settings.timeline_mark_cycles, "preview": settings.timeline_preview}
    return {"replan": settings.replan, "timeline": {"path": path, **marks}}


def _connect(
    context: Context,
    peers: list[tuple[int, bool, str, list[tuple[str, int]], str]],
    near: tuple[Sequence[int], Sequence[int]],
    rendezvous: Rendezvous,
) -> str | None:
    """Connect to the ranks in `near`, which are this host's ranks and the neighbours.

    Returns:
        The error's text, or None on success.
    """
    places = reach.places_text(peers)
    waiting = WaitingLines()

    def disturbed() -> bool:
        waiting.say(lambda: f"this rank is not connected yet to every rank that it needs{places}")
        return rendezvous.disturbed()

    try:
        if context.connect(peers, list(near[0]), list(near[1]), rendezvous.left_s, disturbed):
            return None
    except (OSError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {failure}{places}"
    return "it gave up connecting because another rank had failed"


def _spin_s(cores: Sequence[Sequence[int]]) -> float:
    """Return how long callers may spin.

    The time is 0 unless every rank of this host can have a core of its own from `cores`.
    """
    return _SPIN_S if len(set(chain.from_iterable(cores))) >= len(cores) else 0.0


def _say_how_memory_moves(context: Context, own: int, local_ranks: tuple[int, ...]) -> None:
    """Log how each rank of this host reads data in this rank's ordinary memory."""
    readers = set(context.read_by())  # each rank has tried to read before it reported that it is connected
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
    started: tuple[Identity, Settings, LauncherNews],
    membership: Membership,
    carriers: tuple[Context, MpiEngine | None, RailWatch | None],
    planned: tuple[Pins | None, float],
    pids: tuple[dict[int, int], dict[int, int]],  # of this rank's siblings, and of all ranks of this host
) -> World:
    identity, settings, news = started
    context, engine, rail_watch = carriers
    control = Control(context, news.tell_lost) if membership.size > 1 else None
    if rail_watch is not None:
        rail_watch.start()
    glossary = Glossary()
    channel = None if control is None else _launcher_channel(identity, settings)
    services = ProcessServices(
        context=context,
        holdings=Holdings(context),
        world_rank=identity.rank,
        stall_warn_s=settings.stall_warn_s,
        stall_timeout_s=settings.stall_timeout_s,
        rank_status=NOBODY if control is None else RankStatus(control, identity.rank, settings.stall_warn_s, pids[0]),
        control=control,
        glossary=glossary,
        pins=planned[0],
        replan=settings.replan,
        device_path=settings.device_path,
        seals=settings.seal,
        between_hosts="tcp" if engine is None else "mpi",
        spin_s=planned[1],
        generation=GenerationEnd(identity.rank, may_end=channel is not None),
    )
    vote = None
    if control is not None:
        control.start()
        if channel is not None:
            least = settings.min_ranks or 1
            ids = membership.ids
            processes = VotingProcesses(
                pids={number: pids[1].get(rank) for rank, number in enumerate(ids)},
                hosts=[[ids[rank] for rank in ranks] for ranks in membership.topology.hosts],
            )
            vote = GenerationVote(control, channel, processes, services.generation, identity.job, least)
            vote.start()
    events = EventLog(context.take_events)
    reporter = None
    if settings.record and settings.reports is not None and not STEPS.is_read:  # a process has one launcher
        reporter = StepReporter(context, events.reader(), news.report_steps, membership)
        reporter.start()
    return World(
        identity=identity,
        settings=settings,
        membership=membership,
        services=services,
        context=context,
        engine=engine,
        group=group_named("world", services, membership),
        pid=os.getpid(),
        rail_watch=rail_watch,
        control=control,
        vote=vote,
        reporter=reporter,
        timelines=Timelines(membership, context, glossary, lambda name: group_named(name, services, membership)),
        events=events,
        news=news,
    )


def _launcher_channel(identity: Identity, settings: Settings) -> LauncherChannel | None:
    """Return the channel to the launcher if the ranks go on without lost ones, else None."""
    if settings.min_ranks is None or settings.reports is None:
        return None
    try:
        proof = proof_of(identity.secret, identity.job, identity.rank)
        return LauncherChannel(identity.votes or vote_address(settings.reports), identity.rank, proof)
    except (OSError, ValueError) as error:
        # The launcher refuses a process that joins a second time. It ends the job when this rank fails, as without
        # --min-ranks.
        _log.warning("rank %d is lost with the whole job: the launcher keeps no vote of it (%s)", identity.rank, error)
        return None


def _files_of(settings: Settings) -> tuple[Topology | None, Pins | None]:
    """Return the contents of the topology file and of the plan file.

    The value of a file that is not set is None.
    """
    with naming("MULTIRING_TOPOLOGY"):
        known = None if settings.topology is None else read_topology(settings.topology)
    with naming("MULTIRING_PLAN"):
        pins = None if settings.plan is None else read_pins(settings.plan)
    return known, pins


def _digest_of(path: str | None) -> str:
    """Return a digest of the file's contents, or "" without a file."""
    return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _refuse_other_files(peer_infos: list[dict[str, Any]]) -> None:
    for file in ("topology", "plan"):
        _refuse_unlike(peer_infos, file)


def _refuse_unlike(peer_infos: list[dict[str, Any]], file: str) -> None:
    """Raise RendezvousError unless all ranks have the same file of this kind, or none."""
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
    """Raise RendezvousError if MULTIRING_REPLAN differs between ranks."""
    without = [rank for rank, peer_info in enumerate(peer_infos) if not peer_info["replan"]]
    if without and len(without) < len(peer_infos):
        raise RendezvousError(
            f"ranks {without} have MULTIRING_REPLAN=0, but the others do not; set it to the same value on all ranks"
        )


def _topology(known: Topology | None, hosts: tuple[tuple[int, ...], ...], peer_infos: list[dict[str, Any]]) -> Topology:
    """Return the job's topology.

    The topology file, if any, gives the links. The hosts and their names are those that the ranks have reported.
    """
    names = tuple(peer_infos[ranks[0]]["name"] for ranks in hosts)
    return Topology(hosts, names=names) if known is None else known.placed(hosts, names)


def _hosts_for(engine: str, names: list[str]) -> tuple[tuple[int, ...], ...]:
    hosts = hosts_of(names)
    if engine == "shm" and len(hosts) > 1:
        raise LaunchError(f"MULTIRING_ENGINE=shm, but the ranks are on {len(hosts)} hosts: {hosts}; want auto")
    return hosts


def hosts_of(names: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in the order of the hosts' first ranks.

    `names` gives each rank's host.
    """
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def _agree(
    context: Context, rendezvous: Rendezvous, own_rails: list[RailEndpoint], wish: dict[str, Any]
) -> list[list[RailEndpoint]]:
    """Return every rank's rails, after all ranks have agreed on them and on their connections."""
    told = rendezvous.exchange({"rails": own_rails, "connections": wish})
    rails = agreed_rails([peer_info["rails"] for peer_info in told])
    connections = agreed_connections([peer_info["connections"] for peer_info in told], len(rails[0]))
    if connections > 1:
        context.use_connections(connections)
    return rails


def _listen(context: Context, identity: Identity, settings: Settings, known: Topology | None) -> list[RailEndpoint]:
    # Ranks that met at an abstract socket are on one machine. Then only processes of this machine may reach them.
    first, last = settings.ports or (0, 0)
    return [
        RailEndpoint(rail.interface, address, context.listen(address, first, last), rail.bits_per_s)
        for rail, address in chosen_rails(settings, known, met_locally=identity.rendezvous.startswith("@"))
    ]

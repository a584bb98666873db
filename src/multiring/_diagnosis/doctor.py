"""Check a job's hosts, from its ranks: rank 0 asks, and makes the report."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Timer

from multiring._diagnosis.checker import HostChecker
from multiring._diagnosis.examination import Examination
from multiring._diagnosis.host import host_reading, topology_here
from multiring._diagnosis.link_rules import unjudged_links
from multiring._diagnosis.rank_links import RankLinks, attend
from multiring._diagnosis.readings import Absence, Needs, Readings
from multiring._diagnosis.report import HealthReport
from multiring._diagnosis.rules import findings_of
from multiring._runtime.bootstrap.addresses import LocalAddress, parse_address
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.launchers import identify, place_told
from multiring._runtime.engines.mpi_library import load_mpi
from multiring._settings import Settings
from multiring.errors import LaunchError, MultiringError

_OF_MPIEXEC = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
_OF_MPI = (*_OF_MPIEXEC, "PMI_RANK", "PMIX_RANK")
_PATIENCE_S = 15.0  # for all ranks; a rank needs seconds to start on busy cores


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Options of a check.

    - needs: what a host must have.
    - planned: the number of ranks that this host is to have; None: as many as the check has.
    - peers: the names of the job's hosts, if the topology file does not have them. Hosts use them to reach rank 0
      through another host.
    - absent: hosts that are known not to answer; on rank 0.
    - patience_s: how long to wait for all ranks.
    - stuck: called if the launcher's own means do not end, with the report that rank 0 then has, and None on
      other ranks. It must end the process.
    """

    needs: Needs = field(default_factory=Needs)
    planned: int | None = None
    peers: tuple[str, ...] = ()
    absent: tuple[Absence, ...] = ()
    patience_s: float = _PATIENCE_S
    stuck: Callable[[HealthReport | None], None] = lambda _: None


def check_job(
    settings: Settings, foreign: Mapping[str, str], options: DoctorOptions, checker: HostChecker | None = None
) -> HealthReport | None:
    """Check the hosts of the job to which this process belongs; return the report on rank 0, and None on other ranks.

    Args:
        settings: this process's settings.
        foreign: the variables of other launchers.
        options: the options.
        checker: takes the readings of this host.

    Raises:
        MultiringError: the settings are invalid, or this rank could not be used. The text says why.
    """
    began_s = time.monotonic()
    checker = checker or HostChecker(settings)
    patient = replace(settings, init_timeout_s=options.patience_s)
    place = place_told(settings, foreign)

    def alone(absent: tuple[Absence, ...] = (), launcher_fault: str = "") -> HealthReport:
        hosts = (host_reading(settings),)
        readings = Readings(hosts=hosts, absent=absent, launcher_fault=launcher_fault)
        return HealthReport(
            readings=readings, findings=findings_of(readings, options.needs), seconds=time.monotonic() - began_s
        )

    def give_up() -> None:
        why = f"the ranks did not meet by their launcher's own means within {2 * options.patience_s:g} s"
        options.stuck(alone((Absence(who="the other ranks", why=why),)) if place.rank == 0 else None)

    # MPI, which some launchers use to meet, may wait forever for a host that cannot be reached.
    watchdog = Timer(2 * options.patience_s, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        if patient.rank is None and any(name in foreign for name in _OF_MPIEXEC):
            load_mpi(foreign, refuses_others=True)
        identity = identify(patient, foreign)
    except LaunchError as error:
        if not any(name in foreign for name in _OF_MPI):
            raise
        return alone(launcher_fault=str(error)) if place.rank == 0 else None
    finally:
        watchdog.cancel()
    if identity.rank:
        attend(identity, checker, _peers(settings, options), options.patience_s, options.planned)
        return None
    readings = _examined(identity, checker, settings, options)
    readings = replace(readings, unread=(*readings.unread, *unjudged_links(readings)))
    return HealthReport(
        readings=readings, findings=findings_of(readings, options.needs), seconds=time.monotonic() - began_s
    )


def _examined(identity: Identity, checker: HostChecker, settings: Settings, options: DoctorOptions) -> Readings:
    planned = options.planned
    is_one_host = identity.size > 1 and isinstance(parse_address(identity.rendezvous), LocalAddress)
    if is_one_host:
        # All ranks are on this host, which rank 0 checks alone.
        planned = planned or identity.size
        identity = replace(identity, size=1)
    with contextlib.closing(RankLinks(identity, checker, planned)) as links:
        known = topology_here(settings)
        examination = Examination(links, identity.size, known, options.patience_s, options.absent)
        return examination.run(identity.stop_telling)


def _peers(settings: Settings, options: DoctorOptions) -> tuple[str, ...]:
    if options.peers:
        return options.peers
    with contextlib.suppress(MultiringError):
        known = topology_here(settings)
        return () if known is None else known.names
    return ()

"""A rank within a Ray actor: the actor's process is the rank."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from multiring._launch.cluster_ranks import ClusterRendezvous, WorkerFacts, rank_variables
from multiring._launch.cluster_worker import ReservedPlace, facts_here
from multiring._launch.horovod import PACKAGES, HorovodPosition, horovod_environment
from multiring._launch.own_modules import module_command
from multiring._launch.pickled_call import Outcome, Returned, call_pickled, failure_of, pickled_outcome
from multiring._runtime import is_initialized, shutdown
from multiring._settings import become_rank, environment_of, inherited_environment

_WATCHDOG_S = 10.0  # it ends processes within 2 s; the kernel may hold one longer


class ActorRank:
    """The rank of this process, in an actor of Ray's."""

    def __init__(self) -> None:
        self._reserved: ReservedPlace | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._executable: Any = None

    def facts(self, name: str) -> WorkerFacts:
        """Return the facts of this worker."""
        return facts_here(name)

    def reserve(self, variables: Mapping[str, str], is_one_host: bool) -> dict[str, Any]:  # noqa: FBT001 -- Ray passes by position
        """Reserve a place for the ranks to meet, and return its `ReservedPlace.told`. Only rank 0 is asked.

        Raises:
            LaunchError: this host has no address that other hosts can reach, or no port is free.
        """
        self._reserved = ReservedPlace(variables, is_one_host=is_one_host)
        return self._reserved.told

    def join(
        self,
        position: HorovodPosition,
        place: ClusterRendezvous,
        variables: Mapping[str, str],
        horovod: bool,  # noqa: FBT001 -- Ray passes by position
    ) -> None:
        """Become a rank. `multiring.init()` joins the job from now on."""
        self._watchdog = subprocess.Popen(  # noqa: S603 -- a module of multiring
            module_command("multiring._launch.rank_watchdog", place.job, str(position.rank)),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        mine = {**variables, **rank_variables(position, place), **environment_of(secret=place.secret)}
        if horovod:
            mine |= horovod_environment(inherited_environment() | mine, position)
            if str(PACKAGES) not in sys.path:
                sys.path.insert(0, str(PACKAGES))
        become_rank(mine)

    def call(self, call: bytes) -> bytes:
        """Call a function, and return the pickled outcome. An error of the function is an outcome, too."""
        return _outcome_of(lambda: call_pickled(call))

    def create(self, call: bytes) -> bytes:
        """Call a function and keep its result, the executable of `execute`. Return the pickled outcome of None."""

        def kept() -> None:
            self._executable = call_pickled(call)

        return _outcome_of(kept)

    def execute(self, call: bytes) -> bytes:
        """Call a function with the executable, and return the pickled outcome."""
        return _outcome_of(lambda: call_pickled(call, self._executable))

    def value(self, call: bytes) -> Any:
        """Call a function, and return its value or raise its error, so that Ray passes both on."""
        return call_pickled(call)

    def leave(self) -> None:
        """Leave the job, and end the processes that this rank has started."""
        if is_initialized():
            with contextlib.suppress(Exception):  # the results are there already
                shutdown()
        if self._reserved is not None:
            self._reserved.release()
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on without this process
                self._watchdog.communicate(b".", _WATCHDOG_S)
        sys.stdout.flush()
        sys.stderr.flush()


def _outcome_of(call: Callable[[], Any]) -> bytes:
    outcome: Outcome
    try:
        return pickled_outcome(Returned(call()))
    except BaseException as error:  # noqa: BLE001 -- every end of the function goes to the driver, also sys.exit
        outcome = failure_of(error)
    return pickled_outcome(outcome)

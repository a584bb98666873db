"""The ranks of a job as Ray actors: start them in a placement group, call functions on them, and end them."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, final

from multiring._launch.cluster_ranks import (
    ClusterRendezvous,
    WorkerFacts,
    check_release,
    check_versions,
    positions_of,
    rank_order,
    variables_to_hand_on,
)
from multiring._launch.cluster_worker import draw_job_name, draw_secret, probed, python_here, version_probe
from multiring._launch.first_failure import Ended, RankEnds, end_in
from multiring._settings import inherited_environment
from multiring._version import VERSION
from multiring.errors import ArgumentError, LaunchError, StateError

OLDEST = (2, 40)
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_FINISH_S = 20.0  # how long ranks may take to leave the job after the function has returned
_END_S = 10.0  # how long killed actors may take to end
_TURN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRequest:
    """What a job wants of the cluster.

    - count: the number of ranks.
    - resources: Ray's resources of each rank.
    - placement: the strategy of the placement group, or a placement group of the caller's.
    - variables: variables to set for the ranks.
    - start_timeout_s: how long the whole start may take.
    - resources_timeout_s: how long the cluster may take to provide the resources. None: as long as the whole start.
    - horovod: whether `import horovod` means multiring in the ranks.
    - ranks_per_bundle: the number of ranks in each bundle of the placement group.
    """

    count: int
    resources: Mapping[str, float]
    placement: Any = "PACK"
    variables: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float
    resources_timeout_s: float | None = None
    horovod: bool = False
    ranks_per_bundle: int = 1

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of the placement group."""
        bundle = {name: amount * self.ranks_per_bundle for name, amount in self.resources.items()}
        return [bundle] * -(-self.count // self.ranks_per_bundle)


def load_ray() -> Any:
    """Return the module `ray`.

    Raises:
        LaunchError: Ray is not installed, or too old.
        StateError: this process has not called `ray.init()`.
    """
    try:
        import ray  # noqa: PLC0415 -- only programs that use Ray need it
    except ImportError as error:
        raise LaunchError(f"multiring.ray needs Ray: pip install 'multiring[ray]' ({error})") from None
    check_release("Ray", ray.__version__, OLDEST)
    if not ray.is_initialized():
        raise StateError("Ray is not initialized: call ray.init() before multiring.ray.run")
    return ray


def current_placement_group() -> Any:
    """Return the placement group in which this process runs, or None."""
    from ray.util import get_current_placement_group  # noqa: PLC0415 -- see load_ray

    return get_current_placement_group()


@final
class RankActors:
    """A context manager within which the ranks of a job are Ray actors.

    Raises:
        ArgumentError: the request is invalid.
        LaunchError: the ranks could not be started; see `multiring.ray.run`.
        StateError: `ray.init()` was not called.
    """

    def __init__(self, request: WorkerRequest) -> None:
        self._request = request
        self._ray = load_ray()
        self._stack = ExitStack()
        self._actors: list[Any] = []  # in the order of the ranks
        self._is_whole = True  # no rank has failed
        self._start_by = 0.0  # by time.monotonic()

    def __enter__(self) -> "RankActors":
        self._start_by = time.monotonic() + self._request.start_timeout_s
        with ExitStack() as stack:
            actors = self._start(self._group(stack), stack)
            try:
                self._join(actors, self._facts(actors))
            except self._ray.exceptions.RayError as error:
                raise LaunchError(f"the ranks could not be started: {error}") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._is_whole:
            self._leave()
        self._stack.close()

    def post(self, call: bytes, method: str = "call", ranks: int | None = None) -> list[Any]:
        """Start a call (`pickled_call`) on every rank.

        Args:
            call: the call.
            method: the method of `ActorRank` that executes it.
            ranks: start it on this many first ranks only.

        Returns:
            a reference to what each rank's method returns.

        Raises:
            StateError: a rank has failed before, so the ranks have no job any more.
        """
        if not self._is_whole:
            raise StateError("a rank of this job has failed, and the others were ended: shut down, and start again")
        shared = self._ray.put(call)  # one copy a host
        return [actor.do.remote(method, shared) for actor in self._actors[:ranks]]

    def wait(self, references: Sequence[Any]) -> RankEnds:
        """Wait until every rank has returned, or until the cause of a failure is known.

        Args:
            references: references to the outcomes, by rank.
        """
        ends = RankEnds(len(references))
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        while not (ends.are_complete or ends.is_decided(time.monotonic())):
            waiting = [reference for reference, rank in rank_of.items() if rank in set(ends.missing)]
            ready, _ = self._ray.wait(waiting, num_returns=1, timeout=_TURN_S)
            for reference in ready:
                ends.add(rank_of[reference], self._end_of(reference), time.monotonic())
        if ends.has_failed:
            self._is_whole = False
            for actor in self._actors:
                self._end(actor)
        return ends

    def _end_of(self, reference: Any) -> Any:
        try:
            return end_in(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            return Ended(f"ended without a result: {error}")

    # -- starting

    def _group(self, stack: ExitStack) -> Any:
        """Return a placement group that is ready."""
        from ray.util import placement_group, remove_placement_group  # noqa: PLC0415 -- see load_ray
        from ray.util.placement_group import PlacementGroup  # noqa: PLC0415 -- as above

        request, group = self._request, self._request.placement
        limit_s = min(request.start_timeout_s, request.resources_timeout_s or request.start_timeout_s)
        until = self._start_by - request.start_timeout_s + limit_s
        if isinstance(group, PlacementGroup):
            if group.bundle_count < len(request.bundles):
                raise ArgumentError(
                    f"the placement group has {group.bundle_count} bundles for {request.count} ranks: want "
                    f"{len(request.bundles)}"
                )
        elif group in _STRATEGIES:
            group = placement_group(request.bundles, strategy=request.placement)
            stack.callback(remove_placement_group, group)
        else:
            raise ArgumentError(f"placement={group!r}: want {', '.join(_STRATEGIES)}, or a PlacementGroup")
        while not group.wait(timeout_seconds=1):
            if time.monotonic() < until:
                continue
            raise LaunchError(
                f"{request.count} ranks with {dict(request.resources)} each (placement {request.placement}) did not "
                f"get their resources within {limit_s:g} s. The cluster has "
                f"{_shown(self._ray.cluster_resources(), request.resources)}, of which are free "
                f"{_shown(self._ray.available_resources(), request.resources)}: start more nodes, ask for less, or "
                "wait longer with start_timeout_s"
            )
        return group

    def _start(self, group: Any, stack: ExitStack) -> list[Any]:
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 -- see load_ray
            PlacementGroupSchedulingStrategy,
        )

        resources = dict(self._request.resources)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        actor_class = self._ray.remote(max_restarts=0, max_task_retries=0, **options)(_actor_class())
        actors: list[Any] = []
        stack.callback(self._await_ends, actors)
        for number in range(self._request.count):
            place = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number // self._request.ranks_per_bundle
            )
            actors.append(actor_class.options(scheduling_strategy=place).remote())
            stack.callback(self._end, actors[-1])
        return actors

    def _facts(self, actors: Sequence[Any]) -> list[WorkerFacts]:
        """Return each worker's facts; the versions are compared first, by code that needs no multiring there."""
        answers = self._get([actor.versions.remote() for actor in actors])
        names = [f"worker {index}" for index in range(len(actors))]
        check_versions(map(probed, names, answers), VERSION, python_here())
        facts: list[WorkerFacts] = self._get(
            [actor.do.remote("facts", name) for actor, name in zip(actors, names, strict=True)]
        )
        return facts

    def _join(self, actors: Sequence[Any], facts: Sequence[WorkerFacts]) -> None:
        """Make each actor a rank."""
        order = rank_order([each.host for each in facts])
        self._actors = [actors[index] for index in order]
        positions = positions_of([facts[index] for index in order])
        is_one_host = len({each.host for each in facts}) == 1
        variables = variables_to_hand_on(inherited_environment(), self._request.variables)
        (told,) = self._get([self._actors[0].do.remote("reserve", variables, is_one_host)])
        place = ClusterRendezvous(**told, secret=draw_secret(), job=draw_job_name("ray"))
        self._get(
            [
                actor.do.remote("join", position, place, variables, self._request.horovod)
                for actor, position in zip(self._actors, positions, strict=True)
            ]
        )

    def _get(self, references: Sequence[Any]) -> list[Any]:
        """Return the values, or raise the first error of a worker.

        All calls share the time of the start.

        Raises:
            LaunchError: a worker does not answer in time.
        """
        try:
            values: list[Any] = self._ray.get(list(references), timeout=max(self._start_by - time.monotonic(), 0.0))
        except self._ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"the workers did not start within {self._request.start_timeout_s:g} s (start_timeout_s)"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (LaunchError, ArgumentError)):
                raise error.cause from None
            raise
        return values

    # -- ending

    def _leave(self) -> None:
        """Let all ranks leave the job in order, so that what they registered for their exit runs."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.do.remote("leave") for actor in self._actors], timeout=_FINISH_S)

    def _end(self, actor: Any) -> None:
        self._ray.kill(actor, no_restart=True)

    def _await_ends(self, actors: Sequence[Any]) -> None:
        """Wait until the actors have ended: a call of a dead actor returns an error."""
        self._ray.wait([actor.versions.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)


def _shown(have: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {have.get(name, 0):g}" for name in wanted) or "nothing of it"


def _actor_class() -> type:
    """Return the class of the actors.

    It is defined in a function, so that Ray sends its code: a worker with another version of multiring, or without it,
    can then still answer `versions`.
    """
    probe = version_probe()

    class MultiringRank:
        def __init__(self) -> None:
            self.worker: Any = None

        def versions(self) -> dict[str, Any]:
            return probe()

        def do(self, what: str, *args: Any) -> Any:
            if self.worker is None:
                from multiring.ray.worker import ActorRank  # noqa: PLC0415 -- as above

                self.worker = ActorRank()
            return getattr(self.worker, what)(*args)

    return MultiringRank

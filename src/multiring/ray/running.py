"""`multiring.ray.run`: call a function on all ranks of a job, and return the results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring._launch.cluster_ranks import check_function, check_start_timeout, check_workers
from multiring._launch.pickled_call import pickled_call
from multiring.ray.actors import RankActors, WorkerRequest

START_S = 120.0


def run(  # noqa: PLR0913 -- what the call is, and how it is placed
    function: Callable[..., Any],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    placement: Any = "PACK",
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = START_S,
) -> list[Any]:
    """Call a function on `workers` ranks of the Ray cluster, and return its results by rank.

    Each rank is an actor in a placement group of its own job. In the function, `multiring.init()` joins the job. Ray
    shows the ranks' output on the driver. All actors, and the placement group, are gone when this function returns or
    raises.

    Args:
        function: the function, called as `function(*args, **kwargs)`.
        workers: the number of ranks.
        args: positional arguments.
        kwargs: keyword arguments.
        resources: Ray's resources of each rank, such as `{"CPU": 2, "GPU": 1}`. Default: one CPU.
        placement: Ray's strategy for the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD; or a
            PlacementGroup of the caller's with a bundle for each rank.
        env: variables to set for the ranks.
        start_timeout_s: how many seconds the start may take: until the cluster has provided the resources and every
            rank's actor runs.

    Raises:
        ArgumentError: an argument is invalid, or the function or its arguments cannot be pickled.
        StateError: `ray.init()` was not called.
        LaunchError: Ray is missing or too old, the cluster has too few resources, a worker has another version of
            multiring, or a rank failed. The other ranks were ended. The error that a rank raised is the cause
            (`__cause__`), and its traceback is in the text.
    """
    check_function(function)
    request = WorkerRequest(
        count=check_workers(workers),
        resources=dict(resources or {"CPU": 1}),
        placement=placement,
        variables=dict(env or {}),
        start_timeout_s=check_start_timeout(start_timeout_s),
    )
    call = pickled_call(function, tuple(args), dict(kwargs or {}))
    with RankActors(request) as ranks:
        ends = ranks.wait(ranks.post(call))
        if ends.has_failed:
            raise ends.error("multiring.ray.run: the function did not return on every rank")
        return ends.results()

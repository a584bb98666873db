"""`horovod.ray.RayExecutor`: ranks that stay on a Ray cluster and run one function after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiring._launch.first_failure import RankEnds
from multiring._launch.pickled_call import pickled_call
from multiring._settings import environment_of
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.ray.actors import RankActors, WorkerRequest, current_placement_group

_ELASTIC = (
    "ElasticRayExecutor: the number of ranks is fixed. Use horovod.ray.RayExecutor(settings, num_workers=...). If a "
    "rank fails, make a new executor, and let the function load its last checkpoint (docs/guide_ray.md)"
)
_FAILED = "RayExecutor: the function did not return on every rank"


@dataclass(kw_only=True)
class RaySettings:
    """The settings of a RayExecutor.

    - timeout_s: how many seconds `hvd.init()` waits for all ranks.
    - placement_group_timeout_s: how many seconds the cluster may take to provide the resources.
    - nics: the interface on which the ranks listen, as a set of one name. None: the route to the other hosts.
    """

    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    nics: set[str] | None = None


class RayExecutor:
    """Ranks on a Ray cluster, with Horovod's interface.

    Args:
        settings: of `RayExecutor.create_settings`.
        num_workers: the number of ranks.
        num_hosts: the number of hosts, in place of `num_workers`; each gets `num_workers_per_host` ranks.
        num_workers_per_host: the number of ranks on each host.
        cpus_per_worker: Ray's CPUs for each rank.
        use_gpu: whether each rank needs GPUs.
        gpus_per_worker: Ray's GPUs for each rank, default 1 with `use_gpu`.
        use_current_placement_group: use the placement group in which this program runs, if there is one.
        min_workers: not available: the number of ranks is fixed.
        max_workers: not available.
        reset_limit: not available.
        cooldown_range: not available.
        elastic_timeout: no effect, because the number of ranks is fixed.
        override_discovery: no effect, for the same reason.

    Raises:
        ArgumentError: neither or both of `num_workers` and `num_hosts` are given.
        UnsupportedError: a varying number of ranks is requested.
    """

    def __init__(
        self,
        settings: RaySettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,  # noqa: ARG002 -- a parameter of elastic jobs
        override_discovery: bool = True,  # noqa: ARG002 -- a parameter of elastic jobs
    ) -> None:
        if any(value is not None for value in (min_workers, max_workers, reset_limit, cooldown_range)):
            raise UnsupportedError(
                "min_workers, max_workers, reset_limit and cooldown_range: the number of ranks is fixed; pass "
                "num_workers"
            )
        if (num_workers is None) == (num_hosts is None):
            raise ArgumentError(f"num_workers={num_workers}, num_hosts={num_hosts}: want exactly one of them")
        if gpus_per_worker is not None and not use_gpu:
            raise ArgumentError(f"gpus_per_worker={gpus_per_worker} without use_gpu=True: pass both or neither")
        self._settings = settings
        self._by_host = num_hosts is not None
        self._count = num_workers if num_workers is not None else (num_hosts or 0) * num_workers_per_host
        self._per_bundle = num_workers_per_host if self._by_host else 1
        if self._count < 1:
            raise ArgumentError(f"{self._count} workers: want at least 1")
        self._resources: dict[str, float] = {"CPU": cpus_per_worker}
        if use_gpu:
            self._resources["GPU"] = 1 if gpus_per_worker is None else gpus_per_worker
        self._uses_current_group = use_current_placement_group
        self._ranks: RankActors | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: set[str] | None = None,
    ) -> RaySettings:
        """Return settings.

        Args:
            timeout_s: how many seconds `hvd.init()` waits for all ranks.
            ssh_identity_file: no effect, because nothing uses ssh.
            ssh_str: not available: a private key that would be written to a file.
            placement_group_timeout_s: how many seconds the cluster may take to provide the resources.
            nics: the interface on which the ranks listen, as a set of one name.

        Raises:
            UnsupportedError: `ssh_str` is given, or several interfaces.
        """
        del ssh_identity_file
        if ssh_str is not None:
            raise UnsupportedError("ssh_str: ranks on Ray need no ssh, and multiring writes no private key to a file")
        if nics is not None and len(nics) > 1:
            raise UnsupportedError(f"nics={sorted(nics)}: want one interface; MULTIRING_RAILS lists several")
        return RaySettings(timeout_s=timeout_s, placement_group_timeout_s=placement_group_timeout_s, nics=nics)

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            executable_cls: a class; each rank makes an object of it, which `execute` passes to its function.
            executable_args: positional arguments for the class.
            executable_kwargs: keyword arguments for the class.
            extra_env_vars: variables to set for the ranks.

        Raises:
            StateError: the ranks run already, or `ray.init()` was not called.
            LaunchError: the ranks could not be started, or the class raised on a rank.
        """
        if self._ranks is not None:
            raise StateError("RayExecutor.start was called before: call shutdown first")
        settings = self._settings
        told: dict[str, object] = {"init_timeout_s": settings.timeout_s}
        if settings.nics:
            told["interface"] = next(iter(settings.nics))
        request = WorkerRequest(
            count=self._count,
            resources=self._resources,
            placement=self._placement(),
            variables={**environment_of(**told), **(extra_env_vars or {})},
            start_timeout_s=settings.placement_group_timeout_s + settings.timeout_s,
            resources_timeout_s=settings.placement_group_timeout_s,
            horovod=True,
            ranks_per_bundle=self._per_bundle,
        )
        call = None
        if executable_cls is not None:
            call = pickled_call(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        ranks = RankActors(request)
        ranks.__enter__()  # `shutdown` is the exit
        self._ranks = ranks
        if call is not None:
            try:
                self._results(ranks.wait(ranks.post(call, "create")))
            except BaseException:
                self.shutdown()
                raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results by rank.

        Raises:
            LaunchError: a rank failed. All ranks were ended. The rank's error is the cause (`__cause__`).
            StateError: the ranks have not been started.
            UnsupportedError: `callbacks` is given.
        """
        _refuse_callbacks(callbacks)
        ranks = self._started()
        return self._results(ranks.wait(ranks.post(pickled_call(fn, tuple(args or ()), dict(kwargs or {})))))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Start `fn(*args, **kwargs)` on every rank, and return references for `ray.get` by rank.

        `ray.get` raises the error of a rank. The other ranks continue until `shutdown`.

        Raises:
            StateError: the ranks have not been started.
            UnsupportedError: `callbacks` is given.
        """
        _refuse_callbacks(callbacks)
        return self._started().post(pickled_call(fn, tuple(args or ()), dict(kwargs or {})), "value")

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call `fn(executable)` on every rank, with the rank's object of `executable_cls`, and return the results.

        Raises:
            LaunchError: a rank failed, as in `run`.
            StateError: the ranks have not been started.
            UnsupportedError: `callbacks` is given.
        """
        _refuse_callbacks(callbacks)
        ranks = self._started()
        return self._results(ranks.wait(ranks.post(pickled_call(fn, (), {}), "execute")))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 only, and return its result.

        Raises:
            LaunchError: the rank failed, as in `run`.
            StateError: the ranks have not been started.
        """
        ranks = self._started()
        (result,) = self._results(ranks.wait(ranks.post(pickled_call(fn, (), {}), "execute", ranks=1)))
        return result

    def shutdown(self) -> None:
        """End the ranks and release their resources."""
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.__exit__(None)

    def _placement(self) -> Any:
        if self._uses_current_group:
            current = current_placement_group()
            if current is not None:
                return current
        return "STRICT_SPREAD" if self._by_host else "PACK"

    def _started(self) -> RankActors:
        if self._ranks is None:
            raise StateError("the ranks of this RayExecutor are not started: call start")
        return self._ranks

    def _results(self, ends: RankEnds) -> list[Any]:
        if ends.has_failed:
            raise ends.error(_FAILED)
        return ends.results()


class ElasticRayExecutor:
    """Not available: the number of ranks is fixed.

    Raises:
        UnsupportedError: always; it names what to use.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(_ELASTIC)

    @classmethod
    def create_settings(cls, *_: object, **__: object) -> RaySettings:
        """Raise UnsupportedError."""
        raise UnsupportedError(_ELASTIC)


def _refuse_callbacks(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        raise UnsupportedError("callbacks: they belong to elastic jobs; the number of ranks is fixed")

"""Small utility functions that scripts import from Horovod.

The scripts import them from `horovod.common.util` and `horovod.runner.common.util.env`.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from multiring._settings import HOROVOD_PLACE, inherited_environment

_T = TypeVar("_T")
LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
# Patterns of variables that are valid on one host only.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "HOROVOD_SECRET_KEY"}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_RANK_AND_SIZE = (
    (HOROVOD_PLACE["rank"], HOROVOD_PLACE["size"]),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class ReduceOps(Protocol):
    """A module with the reduction operations, such as `horovod.torch`."""

    Average: int
    Sum: int


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables during the `with` block.

    A variable whose value is None is not changed.
    """
    wanted = {name: text for name, text in kwargs.items() if text is not None}
    former = {name: text for name, text in inherited_environment().items() if name in wanted}
    os.environ.update(wanted)  # noqa: TID251 -- the function's purpose is to set variables
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)  # noqa: TID251 -- as above
        os.environ.update(former)  # noqa: TID251 -- as above


def get_average_backwards_compatibility_fun(reduce_ops: ReduceOps) -> Callable[[int | None, bool | None], int]:
    """Return a function that turns `op` and `average` into an operation.

    At most one of the two may be given.
    """

    def chosen(op: int | None, average: bool | None) -> int:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError(f"both op={op!r} and average={average!r} are given; pass op only")
        warnings.warn(f"average={average!r} is deprecated; pass op instead", DeprecationWarning, stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return chosen


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number of ranks is a power of two.

    In multiring, Adasum works for any number.
    """
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741 -- Horovod's name
    """Split `l` into `n` pieces of nearly the same length, with longer pieces first."""
    least, longer = divmod(len(l), n)
    ends = [least * (piece + 1) + min(piece + 1, longer) for piece in range(n)]
    return [l[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def is_iterable(x: Any) -> bool:
    """Return whether `x` is iterable."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_exportable(v: str) -> bool:
    """Return whether the environment variable named `v` is also valid on other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the environment, or (0, 1) if it has neither.

    Raises:
        RuntimeError: the environment has only one of the two.
    """
    environment = inherited_environment()
    for rank_name, size_name in _RANK_AND_SIZE:
        rank, size = environment.get(rank_name), environment.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"{rank_name}={rank} and {size_name}={size}: want both set, or neither")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Return whether Open MPI uses the remote-shell agent of Kubeflow's MPI operator."""
    return inherited_environment().get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC

"""Create process groups of the backend "multiring"; torch.distributed calls `create`."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from multiring._frontend.process_sets import close_sets
from multiring._frontend.requirements import is_older
from multiring._runtime import Group
from multiring._runtime.job.job import leave
from multiring.errors import MultiringError
from multiring.torch.c10d.arguments import timeout_of
from multiring.torch.c10d.errors import RefusedError, torch_error
from multiring.torch.c10d.process_group import ProcessGroup
from multiring.torch.c10d.store_rendezvous import Met, meet

# From this release on, torch's C++ code keeps a Work alive that Python has created (PyWorkHolder in
# torch/csrc/distributed/c10d/PyProcessGroup.hpp). In older releases, DDP waits for a deleted Work, and the process
# dies.
_OLDEST_TORCH = "2.7"
# ignite knows the names of torch's own backends, and does not distribute a model under other names. Without this
# warning, a program would not notice.
_IGNITE = (
    'init_process_group("multiring"): ignite\'s idist.auto_model wraps a model in DistributedDataParallel for the '
    'backends "nccl", "gloo" and "mpi" only. With the backend "multiring", each rank would train its own model. Wrap '
    "the model in DistributedDataParallel yourself, or start the program by `multiring run --horovod` and use the "
    'backend "horovod" (docs/torch.md)'
)


class _Now:
    """The current group of all ranks of torch.distributed, and counts of the groups made within it."""

    def __init__(self) -> None:
        self.whole: Group | None = None
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()


_now = _Now()


def create(options: Any, pg_options: Any) -> ProcessGroup:
    """Create the process group that torch describes; torch calls this on the group's ranks only.

    Args:
        options: torch's DistributedBackendOptions.
        pg_options: None, or a Backend.Options whose timeout takes precedence over that of `options`.

    Raises:
        RefusedError: `pg_options` are of another backend, or torch is too old.
        DistBackendError: the ranks could not connect.
        DistStoreError: ranks did not arrive in time.
    """
    require_torch(torch.__version__)
    given_s = timeout_of("pg_options", pg_options)
    name, timeout_s = str(options.group_id), given_s or options.timeout.total_seconds()
    members = tuple(options.global_ranks_in_group)
    try:
        group, on_end = _of_all(options, timeout_s) if not members else _of_some(options, name, members, timeout_s)
    except MultiringError as error:
        raise torch_error('process group of backend "multiring"', error) from error
    return ProcessGroup(group, store=options.store, name=name, timeout_s=timeout_s, on_end=on_end)


def require_torch(version: str) -> None:
    """Raise RefusedError if torch's `version` frees operations that DDP still waits for."""
    if is_older(version, _OLDEST_TORCH):
        raise RefusedError(
            f'process group of backend "multiring": this is torch {version}, which frees operations of a backend in '
            f"Python while DDP waits for them; want torch {_OLDEST_TORCH} or newer. "
            "multiring.torch.distribute and DistributedOptimizer need no process group, and work with older releases"
        )


def _of_all(options: Any, timeout_s: float) -> tuple[Group, Callable[[str], None]]:
    met = _meet(options, timeout_s, is_default=True)
    if "ignite.distributed" in sys.modules and met.group.size > 1 and met.group.rank == 0:
        warnings.warn(_IGNITE, stacklevel=2)
    _now.whole = met.group
    _now.made.clear()

    def on_end(how: str) -> None:
        _now.whole = None
        if met.is_ours:
            close_sets()
        _leave(met, how)

    return met.group, on_end


def _of_some(
    options: Any, name: str, members: tuple[int, ...], timeout_s: float
) -> tuple[Group, Callable[[str], None]]:
    if _now.whole is None:  # torch's group of all ranks has another backend
        met = _meet(options, timeout_s, is_default=False)
        return met.group, lambda how: _leave(met, how)
    # torch may reuse a group's name after the group was destroyed. All ranks count the uses alike.
    count = _now.made[name, members]
    _now.made[name, members] += 1
    return _now.whole.subgroup_named(members, f"torch {name} {count}"), lambda _how: None


def _meet(options: Any, timeout_s: float, *, is_default: bool) -> Met:
    return meet(options.store, options.group_rank, options.group_size, timeout_s, is_default=is_default)


def _leave(met: Met, how: str) -> None:
    if met.is_ours:
        leave(met.world, grace_s=0.0 if how == "was aborted" else None)

"""The arguments of a study, checked, and the study that they give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiring.errors import ArgumentError
from multiring.trials.space import distributions_of
from multiring.trials.storage import StorageWriter, opened, study_in_memory

if TYPE_CHECKING:
    from optuna import Study

_NEVER_S = 1e9

RanksPerTrial = int | str | Callable[[dict[str, Any]], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyArguments:
    """The arguments of `run`, as they came; see there."""

    space: Any
    trials: Any
    ranks_per_trial: Any
    direction: Any
    sampler: Any
    pruner: Any
    storage: Any
    name: Any
    time_limit_s: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """What to run."""

    wanted: StudyArguments
    study: "Study"
    writer: StorageWriter | None
    space: dict[str, Any]  # Optuna's distributions
    trials: int  # the number of trials, with those of earlier jobs
    ranks_of: Callable[[dict[str, Any]], Any]  # how many ranks a trial with these parameters gets
    ranks_per_trial: int | None  # if it is the same for all trials
    time_limit_s: float
    hosts: Sequence[Sequence[int]]  # the ranks of each host


def plan_of(wanted: StudyArguments, hosts: Sequence[Sequence[int]]) -> StudyPlan:
    """Check the arguments of `run`, and open the study.

    Args:
        wanted: the arguments.
        hosts: the ranks of each host.

    Raises:
        ArgumentError: an argument is wrong.
        ImportError: Optuna is not installed.
    """
    optuna = imported_optuna()
    limit_s = _checked(wanted)
    checked_sampler(wanted.sampler)
    if wanted.pruner is not None and not isinstance(wanted.pruner, optuna.pruners.BasePruner):
        raise ArgumentError(f"pruner={wanted.pruner!r}: want a BasePruner of Optuna, or None")
    space = distributions_of(wanted.space)
    ranks_of, constant = ranks_function(wanted.ranks_per_trial, set(space), sum(map(len, hosts)))
    storage, path = (None, None) if wanted.storage is None else opened(wanted.storage)
    pruner = optuna.pruners.NopPruner() if wanted.pruner is None else wanted.pruner
    study, writer = study_in_memory(wanted.name, wanted.direction, space, wanted.sampler, pruner, storage)
    if writer is not None and path is not None:
        writer.watch(path)
    return StudyPlan(
        wanted=wanted,
        study=study,
        writer=writer,
        space=space,
        trials=wanted.trials,
        ranks_of=ranks_of,
        ranks_per_trial=constant,
        time_limit_s=limit_s,
        hosts=hosts,
    )


def imported_optuna() -> Any:
    """Return the module Optuna.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 -- only the rank that holds the study needs it
    except ModuleNotFoundError as error:
        raise ImportError("multiring.trials: Optuna is not installed; pip install 'multiring[trials]'") from error
    return optuna


def checked_sampler(sampler: Any) -> None:
    """Refuse what is no sampler of Optuna, and not None."""
    if sampler is not None and not isinstance(sampler, imported_optuna().samplers.BaseSampler):
        raise ArgumentError(f"sampler={sampler!r}: want a BaseSampler of Optuna, or None")


def checked_direction(direction: Any) -> None:
    """Refuse another direction than the two."""
    if direction not in ("minimize", "maximize"):
        raise ArgumentError(f"direction={direction!r}: want 'minimize' or 'maximize'")


def _checked(wanted: StudyArguments) -> float:
    """Check the arguments that need no Optuna; return the time limit in seconds."""
    if isinstance(wanted.trials, bool) or not isinstance(wanted.trials, int) or wanted.trials < 1:
        raise ArgumentError(f"trials={wanted.trials!r}: want a whole number, 1 or more")
    checked_direction(wanted.direction)
    if not isinstance(wanted.name, str) or not wanted.name:
        raise ArgumentError(f"name={wanted.name!r}: want a text")
    limit_s = _NEVER_S if wanted.time_limit_s is None else wanted.time_limit_s
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not limit_s > 0:  # so that NaN is wrong
        raise ArgumentError(f"time_limit_s={wanted.time_limit_s!r}: want seconds above 0, or None")
    return float(min(limit_s, _NEVER_S))


def ranks_function(wanted: Any, names: set[str], size: int) -> tuple[Callable[[dict[str, Any]], Any], int | None]:
    """Return the function that gives a trial's number of ranks, and the number if it is the same for all.

    Args:
        wanted: the argument `ranks_per_trial` of `run`.
        names: the names of the parameters.
        size: the number of ranks.

    Raises:
        ArgumentError: `wanted` is none of those.
    """
    if isinstance(wanted, str):
        if wanted not in names:
            raise ArgumentError(f"ranks_per_trial={wanted!r}: want one of the parameters {sorted(names)}, or a number")
        return (lambda params: params[wanted]), None
    if callable(wanted):
        return wanted, None
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= size:
        raise ArgumentError(f"ranks_per_trial={wanted!r}: want 1 to {size}, the number of ranks, or a function")
    if size % wanted:
        raise ArgumentError(
            f"ranks_per_trial={wanted}: {size} ranks make {size // wanted} groups, and {size % wanted} of them would "
            f"never work; want a divisor of {size}, or another number of ranks"
        )
    return (lambda _params: wanted), wanted

"""The arguments of a study, checked, and the study that they give."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from multiring._arguments import is_number, require_choice, require_whole, shown, whole
from multiring.errors import ArgumentError, MultiringError
from multiring.trials.space import distributions_of
from multiring.trials.storage import StorageWriter, opened, storage_error, study_in_memory

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
    _require_packages("pruner", wanted.pruner)
    space = distributions_of(wanted.space)
    size = sum(map(len, hosts))
    ranks_of, constant = ranks_function(wanted.ranks_per_trial, set(space), size)
    if isinstance(wanted.ranks_per_trial, str):
        _require_counts(wanted.ranks_per_trial, space[wanted.ranks_per_trial], size)
    storage, path = (None, None) if wanted.storage is None else opened(wanted.storage)
    pruner = optuna.pruners.NopPruner() if wanted.pruner is None else wanted.pruner
    try:
        study, writer = study_in_memory(wanted.name, wanted.direction, space, wanted.sampler, pruner, storage)
        if writer is not None and path is not None:
            writer.watch(path)
    except MultiringError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise storage_error(wanted.storage, error) from error
    return StudyPlan(
        wanted=wanted,
        study=study,
        writer=writer,
        space=space,
        trials=require_whole("trials", wanted.trials, 1),
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
        if error.name != "optuna":
            raise
        raise ImportError("multiring.trials: Optuna is not installed; pip install 'multiring[trials]'") from error
    return optuna


def checked_sampler(sampler: Any) -> None:
    """Refuse what is no sampler of Optuna, and not None.

    Raises:
        ArgumentError: it is none.
        ImportError: it needs a package that is not installed.
    """
    if sampler is not None and not isinstance(sampler, imported_optuna().samplers.BaseSampler):
        raise ArgumentError(f"sampler={sampler!r}: want a BaseSampler of Optuna, or None")
    _require_packages("sampler", sampler)


# The packages that Optuna imports at the first trial that needs them, which can come after hours.
PACKAGES = {
    "CmaEsSampler": ("cmaes",),
    "GPSampler": ("scipy", "torch"),
    "QMCSampler": ("scipy",),
    "WilcoxonPruner": ("scipy",),
}


def _require_packages(what: str, chosen: Any) -> None:
    """Raise ImportError if a sampler or a pruner needs a package that is not installed."""
    for kind in type(chosen).__mro__:
        of_optuna = kind.__module__.partition(".")[0] == "optuna"
        missing = [each for each in PACKAGES.get(kind.__name__, ()) if of_optuna and not _is_installed(each)]
        if missing:
            raise ImportError(
                f"{what}: Optuna's {kind.__name__} needs {' and '.join(missing)}, which is not installed; pip install "
                f"{' '.join(missing)}, or choose another {what}"
            )


def _is_installed(package: str) -> bool:
    return sys.modules.get(package) is not None or find_spec(package) is not None


def checked_direction(direction: Any) -> None:
    """Refuse another direction than the two."""
    require_choice("direction", direction, ("minimize", "maximize"))


def _checked(wanted: StudyArguments) -> float:
    """Check the arguments that need no Optuna; return the time limit in seconds."""
    require_whole("trials", wanted.trials, 1)
    checked_direction(wanted.direction)
    if not isinstance(wanted.name, str) or not wanted.name:
        raise ArgumentError(f"name={shown(wanted.name)}: want a text")
    limit_s = _NEVER_S if wanted.time_limit_s is None else wanted.time_limit_s
    if not is_number(limit_s) or not limit_s > 0:  # so that NaN is wrong
        raise ArgumentError(f"time_limit_s={shown(wanted.time_limit_s)}: want seconds above 0, or None")
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
    count = whole(wanted)
    if count is None or not 1 <= count <= size:
        raise ArgumentError(f"ranks_per_trial={wanted!r}: want 1 to {size}, the number of ranks, or a function")
    if size % count:
        raise ArgumentError(
            f"ranks_per_trial={count}: {size} ranks make {size // count} groups, and {size % count} of them would "
            f"never work; want a divisor of {size}, or another number of ranks"
        )
    return (lambda _params: count), count


def _require_counts(name: str, distribution: Any, size: int) -> None:
    """Refuse a parameter that cannot give a trial's number of ranks.

    Values above `size` are allowed beside smaller ones, so that a study goes on in a job of fewer ranks.
    """
    # A range is judged by its first value: the smallest one, which is no whole number if the others are none.
    choices = getattr(distribution, "choices", None) or [distribution.low]
    wrong = [each for each in choices if isinstance(each, bool) or not isinstance(each, int) or each < 1]
    if wrong or min(choices) > size:
        raise ArgumentError(
            f"ranks_per_trial={name!r}: this parameter has the value {(wrong or choices)[0]!r}; want whole numbers, 1 "
            f"or more, and at least one up to {size}, the number of ranks"
        )

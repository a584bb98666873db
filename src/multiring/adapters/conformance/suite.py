"""Run the checks on an adapter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from multiring._frontend import lifecycle
from multiring._frontend.object_collectives import allgather_object
from multiring.adapters.conformance.adapter import Adapter
from multiring.adapters.conformance.checks import CHECKS
from multiring.adapters.conformance.rank import Rank
from multiring.errors import ArgumentError, MultiringError

RANKS = 3
ENDS = ("killed rank", "exception on one rank", "Ctrl-C")
"""The names of the checks that end a job. Each needs a job of its own (`lose_a_rank`, `be_interrupted`)."""


class Outcome(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    `text` has the reason for skipping it, or the failures of the ranks.
    """

    check: str
    outcome: Outcome
    text: str = ""


def run(adapter: Adapter, checks: Mapping[str, Callable[[Rank], None]] = CHECKS) -> list[Result]:
    """Run the checks, and return their results, which are the same on every rank.

    All three ranks of the job call it. The function joins the job by the adapter's `init`, and leaves it at the end.

    Args:
        adapter: the framework's adapter.
        checks: the checks to run; by default all.

    Raises:
        ArgumentError: the job does not have three ranks, or `cannot` names an unknown check or lacks a reason.
        RendezvousError: a rank did not join the job again after a failed check.
    """
    unknown = sorted(set(adapter.cannot) - {*CHECKS, *ENDS})
    if unknown:
        raise ArgumentError(
            f"the adapter's `cannot` names {unknown}, which are not checks; want names of {[*CHECKS, *ENDS]}"
        )
    silent = sorted(name for name, reason in adapter.cannot.items() if not reason.strip())
    if silent:
        raise ArgumentError(
            f"the adapter's `cannot` has no reason for {silent}; write why the framework cannot pass these checks"
        )
    adapter.init(process_sets="dynamic")
    if lifecycle.size() != RANKS:
        raise ArgumentError(f"the suite runs on {RANKS} ranks; this job has {lifecycle.size()}")
    here = Rank(adapter, lifecycle.rank(), lifecycle.size())
    try:
        return [_one(name, check, here) for name, check in checks.items()]
    finally:
        lifecycle.shutdown()


def _one(name: str, check: Callable[[Rank], None], here: Rank) -> Result:
    reason = here.adapter.cannot.get(name)
    if reason is not None:
        return Result(name, Outcome.SKIPPED, reason)
    told = ""
    try:
        check(here)
    except Exception as error:  # noqa: BLE001 -- the error is sent to all ranks
        told = f"{type(error).__name__}: {error}"
    texts = _texts_of_all(name, told)
    failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    if not failed:
        return Result(name, Outcome.PASSED)
    # Operations that a rank never called would be matched with operations of the next check.
    lifecycle.shutdown()
    here.adapter.init(process_sets="dynamic")
    return Result(name, Outcome.FAILED, failed)


def _texts_of_all(name: str, told: str) -> list[str]:
    try:
        found: list[str] = allgather_object(told, name=f"conformance of {name}")
    except (MultiringError, RuntimeError) as error:
        return [told or f"the ranks are out of step: {error}"]
    return found

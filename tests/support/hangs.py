"""Ten kinds of hang and disagreement in a stream of named operations: one rank's fault, and the errors of all ranks.

test_named_hangs.py runs a few cases of each kind; benchmarks/evidence/jobs/hangs.py runs many.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.support.faults import Fault, freeze
from tests.support.ranks import Here, report_of

from multiring._runtime.named.named import NamedOperations
from multiring.errors import DisagreementError, MultiringError

DISAGREEMENTS = {"shape": "shape", "type": "data type", "reduction": "reduction operation"}
DEADLOCKS = ("order", "skipped", "set")
ABSENCES = ("loop", "stopped", "killed", "ended")
KINDS = (*DISAGREEMENTS, *DEADLOCKS, *ABSENCES)
STEPS = 14
WARN_S, TIMEOUT_S = 0.5, 1.5
LOOP_S = 5.0  # an endless loop, from the other ranks' point of view


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A stream of operations in which one rank deviates at one step."""

    kind: str
    ranks: int
    culprit: int
    at: int  # the step of the deviation
    window: int  # operations that a rank keeps in flight
    negotiated: bool  # the ranks agreed on an order before the deviation
    engine: str

    @classmethod
    def of(cls, kind: str, seed: int, engine: str | None = None) -> "Case":
        """Return a random case of `kind`, determined by `seed`."""
        chance = random.Random(f"{kind} {seed}")  # noqa: S311 -- to be the same again
        ranks = chance.randint(2, 4)
        return cls(
            kind=kind,
            ranks=ranks,
            culprit=chance.randrange(ranks),
            at=chance.randint(1, STEPS - 6),
            window=1 if kind == "order" else chance.choice((1, 3)),  # with several in flight, another order is allowed
            negotiated=chance.random() < 0.4,
            engine=engine or chance.choice(("shm", "tcp")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The error that a rank got, the seconds until then, and the number of completed steps."""

    error: str
    text: str
    signature: dict[int, tuple[tuple[str, str], ...]]
    after_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operation as one rank posts it."""

    name: str
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    op: str = "sum"
    other_set: bool = False


def steps_of(case: Case, rank: int) -> list[Step]:
    """Return the operations that `rank` posts."""
    steps = [Step(f"tensor.{index}") for index in range(STEPS)]
    if rank != case.culprit:
        return steps
    name = steps[case.at].name
    other = {
        "shape": Step(name, shape=(5,)),
        "type": Step(name, dtype="float64"),
        "reduction": Step(name, op="max"),
        "set": Step(name, other_set=True),
    }
    if case.kind == "order":
        steps[case.at], steps[case.at + 1] = steps[case.at + 1], steps[case.at]
    elif case.kind == "skipped":
        del steps[case.at]
    else:
        steps[case.at] = other.get(case.kind, steps[case.at])
    return steps


def live(here: Here, case: Case) -> Told:
    """Run the rank's stream of operations."""
    group = here.join(stall_warn_s=WARN_S, stall_timeout_s=TIMEOUT_S)
    sets = NamedOperations(group), NamedOperations(group)
    if case.negotiated:
        pair = [Step("first"), Step("second")]
        for handle in [submit(sets, step) for step in (pair[::-1] if here.rank == case.culprit else pair)]:
            handle.wait()
    group.barrier()
    steps = steps_of(case, here.rank)
    told = Told(error="", text="", signature={}, after_s=0.0, steps=0)
    done = 0
    while done < len(steps):
        some = steps[done : done + case.window]
        started_s = time.monotonic()
        try:
            handles = []
            for index, step in enumerate(some, done):
                if here.rank == case.culprit and index == case.at and case.kind in ABSENCES:
                    go_away(here, case.kind)
                    return told
                handles.append(submit(sets, step))
            started_s = time.monotonic()
            for handle in handles:
                try:
                    handle.wait()
                except DisagreementError as error:
                    told = told_of(error, started_s, done)
        except MultiringError as error:
            return told_of(error, started_s, done)
        done += len(some)
    return Told(error=told.error, text=told.text, signature=told.signature, after_s=told.after_s, steps=done)


def submit(sets: Sequence[NamedOperations], step: Step) -> Any:
    array = np.ones(step.shape, step.dtype)
    signature = (
        ("operation", "allreduce"),
        ("data type", step.dtype),
        ("shape", str(step.shape)),
        ("reduction operation", step.op),
    )
    named = sets[step.other_set]
    return named.submit(step.name, signature, lambda group, label: group.all_reduce_async(array, step.op, label=label))


def told_of(error: MultiringError, started_s: float, steps: int) -> Told:
    signature = error.signatures if isinstance(error, DisagreementError) else {}
    after_s = time.monotonic() - started_s
    return Told(error=type(error).__name__, text=str(error), signature=signature, after_s=after_s, steps=steps)


def go_away(here: Here, kind: str) -> None:
    """Leave the stream without ending an operation: loop, wait for a stop signal, die or exit."""
    if kind == "loop":
        until_s = time.monotonic() + LOOP_S
        while time.monotonic() < until_s:
            pass
    elif kind == "stopped":
        here.reach("to be stopped")
        time.sleep(60)
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def check(case: Case) -> float:
    """Run the case and check the error of every rank. Return the longest wait, in seconds.

    Raises:
        AssertionError: a rank got a wrong error or none.
    """
    faults: list[Fault] = [freeze(case.culprit).at("to be stopped")] if case.kind == "stopped" else []
    report = report_of(live, case.ranks, case, engine=case.engine, faults=faults, deadline_s=120)
    longest_s = 0.0
    for outcome in report.outcomes:
        if outcome.rank == case.culprit and case.kind in ABSENCES:
            continue
        assert outcome.error is None, f"{case}: rank {outcome.rank} raised {outcome.error!r}\n{outcome.output}"
        told: Told = outcome.value
        assert is_right(case, outcome.rank, told), f"{case}: rank {outcome.rank} was told {told}\n{outcome.output}"
        longest_s = max(longest_s, told.after_s)
    return longest_s


def is_right(case: Case, rank: int, told: Told) -> bool:
    """Return whether the error of `rank` names the culprit and the operation."""
    name, who = f"tensor.{case.at}", f"rank {case.culprit}"
    if case.kind in DISAGREEMENTS:
        what = DISAGREEMENTS[case.kind]
        values = {each: dict(signature)[what] for each, signature in told.signature.items()}
        odd = values.pop(case.culprit)
        return (
            (told.error, told.steps) == ("DisagreementError", STEPS)
            and len(values) > 0
            and odd not in values.values()
            and all(part in told.text for part in (f"operation '{name}'", what, f"{who}: {odd}"))
        )
    if case.kind in ("order", "skipped"):
        absent = f"for operation '{name}', to which {who} has not come"
        return told.error == "StallError" and absent in told.text and f"{who} waits for operation" in told.text
    if case.kind == "set" and rank == case.culprit:
        return (
            told.error == "StallError" and f"operation '{name}'" in told.text and "nothing came from rank" in told.text
        )
    if case.kind in ("killed", "ended"):
        verb = "died" if case.kind == "killed" else "left the job"
        return told.error == "PeerLostError" and f"{who} {verb}" in told.text and "operation 'tensor." in told.text
    where = {
        "loop": "at hangs.py:",
        "stopped": f"{who} does not answer",
        "set": who,
    }[case.kind]
    first = case.at - case.at % case.window  # operations in flight with this one may be unfinished too
    names = [f"operation 'tensor.{index}'" for index in range(first, case.at + 1)]
    return (
        told.error == "StallError"
        and any(each in told.text for each in names)
        and who in told.text
        and where in told.text
    )

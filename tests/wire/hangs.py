"""Ten kinds of hang and disagreement in a stream of named operations: what one rank does, what all are to be told.

Used by test_named_hangs.py, a few of each kind, and by benchmarks/evidence_hangs.py, many.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.wire.faults import Fault, freeze
from tests.wire.ranks import Here, report_of

from multiring.errors import DisagreementError, MultiringError
from multiring.runtime.named.named import NamedOperations

DISAGREEMENTS = {"shape": "shape", "type": "data type", "reduction": "reduction operation"}
DEADLOCKS = ("order", "skipped", "set")
ABSENCES = ("loop", "stopped", "killed", "ended")
KINDS = (*DISAGREEMENTS, *DEADLOCKS, *ABSENCES)
STEPS = 14
WARN_S, TIMEOUT_S = 0.5, 1.5
LOOP_S = 5.0  # an endless loop, as far as the others can see


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One rank does something else at one place of the stream."""

    kind: str
    ranks: int
    culprit: int
    at: int  # the step
    window: int  # operations that a rank has in flight
    negotiated: bool  # whether the ranks had to agree on an order before
    engine: str

    @classmethod
    def of(cls, kind: str, seed: int, engine: str | None = None) -> "Case":
        """Return a case of `kind` at random."""
        chance = random.Random(f"{kind} {seed}")  # noqa: S311 -- to be the same again
        ranks = chance.randint(2, 4)
        return cls(
            kind=kind,
            ranks=ranks,
            culprit=chance.randrange(ranks),
            at=chance.randint(1, STEPS - 6),
            window=1 if kind == "order" else chance.choice((1, 3)),  # nothing is wrong with another order in flight
            negotiated=chance.random() < 0.4,
            engine=engine or chance.choice(("shm", "tcp")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a rank was told: of an error, how long after it began to wait; and how far it came."""

    error: str
    text: str
    signature: dict[int, tuple[tuple[str, str], ...]]
    after_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operation as one rank means it."""

    name: str
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    op: str = "sum"
    other_set: bool = False


def steps_of(case: Case, rank: int) -> list[Step]:
    """Return the rank's stream."""
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
    """Go through the rank's stream."""
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
    """Do what does not end in an operation."""
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
    """Run the case, and check that every rank was told what there is to tell; return how long one took at most, in s.

    Raises:
        AssertionError: a rank was told another thing, or nothing.
    """
    faults: list[Fault] = [freeze(case.culprit).at("to be stopped")] if case.kind == "stopped" else []
    report = report_of(live, case.ranks, case, engine=case.engine, faults=faults, deadline_s=40)
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
    """Return whether `rank` was told of the culprit and of the operation."""
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
    first = case.at - case.at % case.window  # what was in flight with it may not have ended either
    names = [f"operation 'tensor.{index}'" for index in range(first, case.at + 1)]
    return (
        told.error == "StallError"
        and any(each in told.text for each in names)
        and who in told.text
        and where in told.text
    )

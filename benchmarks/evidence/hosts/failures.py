"""Kill, freeze, unplug or slow down hosts of a lab, on both engines.

The claims state which ranks report the failure, and when.
"""

import random
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.evidence.jobs.job import LabJob, Word
from benchmarks.evidence.support.claims import Claim, shown

RANK = Path(__file__).with_name("rank.py")
ENGINES = ("tcp", "mpi")
STAGES = ("init", "collective", "barrier")
TIMES = 50
HOSTS, SLOTS = 3, 2
LAB = f"--hosts {HOSTS} --slots {SLOTS}"
KILLED_S = 5.0
# Waiting for a time-out takes most of the time. Most cases use a short time-out; every tenth uses the documented one.
SHORT_S, LONG_S = 4.0, 20.0
# The last message of a silent peer may come before the fault, so the report may come early. The report itself takes
# time.
EARLY_S, LATE_S = 1.0, 5.0
# the number of jobs that run at the same time; most of their time is waiting
AT_ONCE = {"kill": 4, "freeze": 12, "cut": 12}
SLOWED_S, SLOWED_AT_ONCE = 60.0, 3
START_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A fault of `host` while the job is at `stage`.

    A rank waits `timeout_s` for a silent peer.
    """

    engine: str
    stage: str
    fault: str
    host: int
    delay_s: float
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.engine}, {self.stage}, {self.fault} host{self.host} after {self.delay_s:.2f} s"

    @property
    def late_host(self) -> str:
        """The host that joins init late, or "nobody".

        A missing host keeps the others in init until the fault.
        """
        others = [host for host in range(1, HOSTS) if host != self.host]
        return f"host{others[0]}" if self.stage == "init" and self.fault == "kill" else "nobody"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a fault.

    Attributes:
        seconds: The time until each survivor raised.
        by_launcher: Whether the launcher ended survivors before all of them raised.
    """

    seconds: tuple[float, ...] = ()
    by_launcher: bool = False
    wrong: str = ""


def failures(fault: str, engine: str, share: int) -> Iterator[Claim]:
    """Yield the claims about hosts with the fault "kill", "freeze" or "cut".

    The fault "cut" unplugs a host.
    """
    choice = random.Random(f"4 {fault} {engine}")  # noqa: S311 -- which host, and when
    for stage in STAGES:
        cases = [
            Failure(
                engine=engine,
                stage=stage,
                fault=fault,
                # mpiexec runs on host0, so the job cannot survive the death of host0.
                host=choice.randrange(1 if engine == "mpi" else 0, HOSTS),
                # A killed host needs time to enter init. A frozen or unplugged host may be anywhere near init.
                delay_s=choice.uniform(1.0, 1.5) if stage == "init" and fault == "kill" else choice.random(),
                timeout_s=60.0 if fault == "kill" else LONG_S if number % 10 == 0 else SHORT_S,
            )
            for number in range(max(TIMES // share, 1))
        ]
        with ThreadPoolExecutor(AT_ONCE[fault]) as pool:
            yield judged(cases, list(pool.map(outcome_of, cases)))


def judged(cases: list[Failure], outcomes: list[Outcome]) -> Claim:
    """Return the claim that all cases of one kind ended as expected."""
    first = cases[0]
    wrong = [f"{case}: {outcome.wrong}" for case, outcome in zip(cases, outcomes, strict=True) if outcome.wrong]
    seconds = [
        each - (0 if first.fault == "kill" else case.timeout_s)
        for case, outcome in zip(cases, outcomes, strict=True)
        for each in outcome.seconds
    ]
    done = {"kill": "killed", "freeze": "frozen", "cut": "unplugged"}[first.fault]
    long = sum(case.timeout_s == LONG_S for case in cases)
    when = (
        f"within {KILLED_S:g} s"
        if first.fault == "kill"
        else f"at the time-out ({long} of {LONG_S:g} s, others {SHORT_S:g})"
    )
    after = "" if first.fault == "kill" else " after it"
    figure = (
        f"median {statistics.median(seconds):.2f} s{after}, longest {max(seconds):.2f} s" if seconds else "none told"
    )
    by_launcher = sum(outcome.by_launcher for outcome in outcomes)
    if by_launcher:
        figure += f"; {by_launcher} times mpiexec ended ranks before they could tell"
    stage = f"{len(cases)} hosts {done} during {first.stage}, {first.engine}"
    return Claim(
        text=f"{stage}: every survivor raises {when} and names it",
        figure=shown(wrong) or figure,
        holds=not wrong,
    )


def outcome_of(case: Failure) -> Outcome:
    """Run one job, inject the fault and collect the survivors' reports."""
    settings = {
        "multiring_stall_warn_s": case.timeout_s / 2,
        "multiring_stall_timeout_s": case.timeout_s,
        "multiring_init_timeout_s": max(case.timeout_s, START_S if case.fault == "kill" else 0.0),
    }
    ready = "start" if case.stage == "init" else "work"
    victim = f"host{case.host}"
    with LabJob(LAB, RANK, "fail", case.stage, case.late_host, engine=case.engine, **settings) as job:
        try:
            job.wait_for(lambda heard: sum(word.get("at") == ready for word in heard) == HOSTS * SLOTS, START_S)
            time.sleep(case.delay_s)
            begin = job.fault(f"{case.fault} {victim}")
        except TimeoutError as error:
            return Outcome(wrong=f"the job did not come to {case.stage}: {error}")
        waits = {f"host{host}" for host in range(HOSTS)} - {victim, case.late_host}
        is_over = False
        try:
            job.wait_for(lambda heard: len(told(heard, waits)) == SLOTS * len(waits), case.timeout_s + 3 * LATE_S)
        except TimeoutError:
            is_over = True
        words = told(job.heard, waits)
        output = job.output
    return assessed(case, words, begin, output if is_over else "")


def told(heard: list[Word], hosts: set[str]) -> list[Word]:
    """Return the errors that the ranks of `hosts` reported."""
    return [word for word in heard if "raised" in word and word["host"] in hosts]


def assessed(case: Failure, words: list[Word], begin: float, output: str) -> Outcome:
    """Return the outcome of a job from its survivors' reports.

    The `output` is the job's whole output if some survivors did not report, and empty otherwise.
    """
    names = naming(case.host)
    seconds = tuple(word["at_s"] - begin for word in words)
    unnamed = [word["text"] for word in words if not names.search(word["text"])]
    if unnamed:
        return Outcome(seconds=seconds, wrong=f"not named: {unnamed[0]}")
    early, late = (0.0, KILLED_S) if case.fault == "kill" else (case.timeout_s - EARLY_S, case.timeout_s + LATE_S)
    if any(not early <= each <= late for each in seconds):
        return Outcome(seconds=seconds, wrong=f"raised after {', '.join(f'{each:.2f}' for each in seconds)} s")
    if output and not (case.engine == "mpi" and names.search(output)):
        return Outcome(seconds=seconds, wrong=f"only {len(words)} survivors raised; output:\n{output[-1500:]}")
    return Outcome(seconds=seconds, by_launcher=bool(output))


def naming(host: int) -> re.Pattern[str]:
    """Return a pattern that matches the name of a host or of one of its ranks.

    The rank may be part of a list, such as "ranks 1, 2, 3".
    """
    ranks = "|".join(map(str, ranks_of(host)))
    return re.compile(rf"\bhost{host}\b|\branks? (\d+, )*({ranks})\b")


def ranks_of(host: int) -> range:
    """Return the ranks of a host. All launchers here place ranks host by host."""
    return range(host * SLOTS, (host + 1) * SLOTS)


# ---- slowed down ----


def slowed(engine: str, share: int) -> Iterator[Claim]:
    """Yield the claim about hosts whose links become a hundred times slower."""
    choice = random.Random(f"5 {engine}")  # noqa: S311 -- which host
    cases = [choice.randrange(HOSTS) for _ in range(max(TIMES // share, 1))]
    with ThreadPoolExecutor(SLOWED_AT_ONCE) as pool:
        found = list(pool.map(partial(slowed_once, engine), cases))
    wrong = [text for _, text in found if text]
    named_s = [seconds for seconds, text in found if not text]
    yield Claim(
        text=f"{len(cases)} hosts slowed 100 x, {engine}: named while the job goes on with right sums",
        figure=shown(wrong) or f"named after {statistics.median(named_s):.1f} s, longest {max(named_s):.1f} s",
        holds=not wrong,
    )


def slowed_once(engine: str, host: int) -> tuple[float, str]:
    """Slow one host down; return the seconds until a rank named it, and any fault."""
    names = naming(host)

    def is_named(heard: list[Word]) -> bool:
        return any("warned" in word and names.search(word["warned"]) for word in heard)

    with LabJob(f"{LAB} --link 1gbit", RANK, "work", 1 << 20, engine=engine) as job:
        try:
            job.wait_for(lambda heard: any(word.get("turns", 0) > 20 for word in heard), START_S)
            begin = job.fault(f"slow host{host} 10mbit")
            job.wait_for(is_named, SLOWED_S)
            named_s = time.monotonic() - begin
            turns = last_turns(job.heard)
            job.wait_for(lambda heard: last_turns(heard) > turns, SLOWED_S)
            job.tell("stop")
            job.wait_for(lambda heard: sum("done" in word for word in heard) == HOSTS * SLOTS, SLOWED_S)
        except TimeoutError as error:
            return 0.0, f"{engine}, host{host}: {error}"
        right = all(word.get("right", True) for word in job.heard)
    return named_s, "" if right else f"{engine}, host{host}: wrong sums"


def last_turns(heard: list[Word]) -> int:
    """Return the number of sums in rank 0's last report."""
    return max((word["turns"] for word in heard if "turns" in word), default=0)

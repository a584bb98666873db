"""The evidence between hosts: its evaluation of figures and texts, without a lab."""

import argparse
from typing import Any

import pytest
from benchmarks.evidence.hosts import training as evidence_training
from benchmarks.evidence.hosts.failures import Failure, assessed, judged
from benchmarks.evidence.hosts.main import CLAIMS, pace, spans
from benchmarks.evidence.planner.main import LABS, Configuration, Tried, together
from benchmarks.evidence.planner.main import assessed as assessed_plan

from multiring._cli import lab

# ---- failures ----


def failure(fault: str = "kill", *, engine: str = "tcp", stage: str = "collective", timeout_s: float = 4.0) -> Failure:
    return Failure(engine=engine, stage=stage, fault=fault, host=1, delay_s=0.5, timeout_s=timeout_s)


def word(text: str, at_s: float = 101.0) -> dict[str, Any]:
    return {"raised": "PeerLostError", "text": text, "at_s": at_s, "host": "host0"}


@pytest.mark.parametrize("text", ["rank 2 died", "ranks 0, 3 are silent", "host1 is gone"])
def test_the_host_or_a_rank_of_it_is_named(text: str) -> None:
    outcome = assessed(failure(), [word(text)], 100.0, "")
    assert (outcome.seconds, outcome.wrong) == ((1.0,), "")


@pytest.mark.parametrize("text", ["rank 20 died", "ranks 0, 1 died, 2 of 6", "host10 is gone", "somebody died"])
def test_another_name_is_none(text: str) -> None:
    assert assessed(failure(), [word(text)], 100.0, "").wrong == f"not named: {text}"


@pytest.mark.parametrize(
    ("fault", "after_s", "good"),
    [("kill", 4.9, True), ("kill", 5.1, False), ("freeze", 4.5, True), ("freeze", 1.0, False), ("cut", 9.5, False)],
)
def test_each_fault_has_its_time(fault: str, after_s: float, *, good: bool) -> None:
    outcome = assessed(failure(fault), [word("rank 2", 100.0 + after_s)], 100.0, "")
    assert (outcome.wrong == "") is good


def test_survivors_who_say_nothing_are_missed_unless_mpiexec_spoke_for_them() -> None:
    assert assessed(failure(), [], 100.0, "host1 is gone").wrong.startswith("only 0 survivors raised")
    spoken = assessed(failure(engine="mpi"), [], 100.0, "proxy of host1 died")
    assert (spoken.wrong, spoken.by_launcher) == ("", True)
    assert assessed(failure(engine="mpi"), [], 100.0, "something died").wrong


def test_who_is_late_is_neither_the_victim_nor_the_first_host() -> None:
    assert failure(stage="init").late_host == "host2"
    assert failure("freeze", stage="init").late_host == failure().late_host == "nobody"


def test_one_that_went_wrong_is_a_missed_claim_with_its_case() -> None:
    cases = [failure("freeze"), failure("freeze", timeout_s=20.0)]
    outcomes = [
        assessed(cases[0], [word("rank 2", 104.5)], 100.0, ""),
        assessed(cases[1], [word("x", 120.5)], 100.0, ""),
    ]
    claim = judged(cases, outcomes)
    assert not claim.holds
    assert "1 of 20 s, others 4" in claim.text
    assert "tcp, collective, freeze host1 after 0.50 s: not named: x" in claim.figure
    assert judged(cases[:1], outcomes[:1]).figure == "median 0.50 s after it, longest 0.50 s"


# ---- plans ----


def tried(algorithm: str, grid: tuple[int, ...], predicted_s: float, *turns: float) -> Tried:
    return Tried(algorithm, grid, (1,), None, predicted_s, turns)


def configuration(flat_s: float, multi_s: float, predicted_flat_s: float = 2.0) -> Configuration:
    return Configuration(
        "lab", 1 << 20, ((tried("direct", (2, 4), 1.0, multi_s), tried("ring", (8,), predicted_flat_s, flat_s)),)
    )


def test_a_gain_that_was_predicted_has_to_come() -> None:
    gained, winners = together([configuration(2.0, 1.0), configuration(0.5, 1.0, predicted_flat_s=1.05)])
    assert gained.holds
    assert "(1 times)" in gained.text
    assert gained.figure == "2.00 to 2.00 x"
    assert winners.figure == "direct on 2 axes 1, ring on 1 axes 1"
    lost, _ = together([configuration(2.0, 1.0), configuration(0.9, 1.0)])
    assert not lost.holds
    assert "0.90 x" in lost.figure
    nothing, _ = together([])
    assert not nothing.holds


def test_plans_are_held_against_the_chosen_one_turn_by_turn() -> None:
    chosen = tried("ring", (8,), 1.0, 1.0, 4.0, 1.0, 1.0)
    lucky = tried("direct", (8,), 1.0, 0.9, 5.0, 1.1)
    faster = tried("exchange", (8,), 1.0, 0.8, 3.2, 0.8, 0.8)
    both = Configuration("lab", 4, ((chosen, lucky, faster),))
    assert both.behind(lucky.plan) == pytest.approx(0.909, abs=1e-3)
    assert both.best == faster.plan
    assert not assessed_plan(both).holds
    alone = Configuration("lab", 4, ((chosen, lucky),))
    assert alone.best == chosen.plan
    assert assessed_plan(alone).holds


def test_several_jobs_tell_together_which_plan_is_best() -> None:
    ring, direct = tried("ring", (8,), 1.0, 1.0, 1.0, 1.0), tried("direct", (8,), 1.0, 1.1, 1.1, 0.5)
    slow_ring, fast_direct = tried("ring", (8,), 1.0, 1.3, 1.3, 1.3), tried("direct", (8,), 1.0, 1.0, 1.0, 1.0)
    one_job_only = tried("exchange", (8,), 1.0, 0.1, 0.1, 0.1)
    # The ring was chosen twice and clearly lost one job. In the other job direct was chosen, so it ties with itself.
    level = Configuration("lab", 4, ((ring, direct), (slow_ring, fast_direct), (fast_direct, slow_ring, one_job_only)))
    assert level.behind(direct.plan) == 1.0
    assert assessed_plan(level).holds
    assert "ring on 8, whole (2 x), direct on 8, whole (1 x)" in assessed_plan(level).figure
    lost = Configuration("lab", 4, ((ring, direct), (slow_ring, fast_direct), (slow_ring, fast_direct)))
    assert lost.behind(direct.plan) == pytest.approx(1.3)
    assert not assessed_plan(lost).holds


def test_there_are_enough_configurations_of_labs_that_can_be() -> None:
    parser = argparse.ArgumentParser()
    lab.add_arguments(parser)
    assert all(parser.parse_args([*words.split(), "true"]).hosts > 1 for words in LABS)
    assert sum(map(len, LABS.values())) >= 20


# ---- rails, training ----


def test_the_pace_before_and_after() -> None:
    heard = [
        {"turns": turns, "at_s": at_s}
        for turns, at_s in ((0, 1.0), (10, 2.0), (20, 3.0), (21, 4.0), (26, 5.0), (31, 6.0))
    ]
    assert (pace(heard, 0.0, 3.5), pace(heard, 3.5, 9.0)) == (10.0, 5.0)
    assert spans(heard, 0.0, 5.0)
    assert not spans(heard, 3.5, 2.5)
    assert not spans([], 0.0, 0.0)


def test_as_good_is_within_two_standard_errors_of_both() -> None:
    plain = [97.0, 98.0, 99.0]
    assert evidence_training.is_as_good([96.0, 97.0, 98.0], plain)
    assert not evidence_training.is_as_good([94.0, 95.0, 96.0], plain)
    assert evidence_training.is_as_good([98.0, 98.0], [98.0, 98.0])


def test_every_claim_can_be_asked_for() -> None:
    faults = {f"{done}-{engine}" for done in ("killed", "frozen", "unplugged", "slowed") for engine in ("tcp", "mpi")}
    assert set(CLAIMS) == {"planner-limited", "planner-unlimited", "ranks", "rail", "digits", *faults}

"""Which members of a population copy which, and with which parameters."""

import math
from random import Random

import optuna
import pytest

from multiring.errors import ArgumentError
from multiring.trials import NoMemberError, PopulationResult, RoundResult
from multiring.trials.breeding import FACTORS, BreedingRules, changes_after, explored
from multiring.trials.copies import holding_order
from multiring.trials.population_holder import PopulationArguments, population_of

SPACE = {"x": optuna.distributions.FloatDistribution(0.0, 100.0)}


def changes(
    values: list[float], *, is_minimized: bool = True, quantile: float = 0.25, resample: float = 0.0
) -> dict[int, int]:
    rules = BreedingRules(is_minimized=is_minimized, quantile=quantile, resample=resample)
    params = {member: {"x": 1.0 + member} for member in range(len(values))}
    found = changes_after(dict(enumerate(values)), params, SPACE, Random(1), rules)  # noqa: S311 -- no secret
    assert all(each.params["x"] in {factor * (1.0 + each.source) for factor in FACTORS} for each in found.values())
    return {member: each.source for member, each in found.items()}


def test_the_worst_copy_the_best() -> None:
    assert changes([3.0, 1.0, 2.0, 4.0]) == {3: 1}
    assert changes([3.0, 1.0, 2.0, 4.0], is_minimized=False) == {1: 3}
    assert changes([1.0, math.nan]) == {1: 0}
    assert changes([math.nan, 2.0, math.inf, 1.0], quantile=0.5).keys() == {0, 2}
    assert set(changes([math.nan, 2.0, math.inf, 1.0], quantile=0.5).values()) <= {1, 3}
    assert changes([2.0, 2.0, 2.0, 2.0]) == {}
    assert changes([math.nan] * 4) == {}
    assert changes([1.0]) == {}
    assert changes([5.0, 1.0, 2.0], quantile=0.5) == {0: 1}
    # Of 100 members, 0.29 are 29, although their product is a little less.
    assert len(changes([float(each) for each in range(100)], quantile=0.29)) == 29
    for seed in range(50):  # nobody is both copied and changed
        found = changes([Random(seed + each).random() for each in range(9)], quantile=0.5)  # noqa: S311
        assert len(found) == 4
        assert not set(found) & set(found.values())


@pytest.mark.parametrize(
    "distribution",
    [
        optuna.distributions.FloatDistribution(0.5, 2.0),
        optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
        optuna.distributions.FloatDistribution(0.0, 1.0, step=0.25),
        optuna.distributions.IntDistribution(1, 9),
        optuna.distributions.IntDistribution(2, 10, step=4),
        optuna.distributions.IntDistribution(1, 4096, log=True),
        optuna.distributions.CategoricalDistribution(["a", "b", None]),
    ],
)
@pytest.mark.parametrize("resample", [0.0, 0.5, 1.0])
def test_explored_parameters_stay_in_the_space(
    distribution: optuna.distributions.BaseDistribution, resample: float
) -> None:
    random = Random(2)  # noqa: S311 -- no secret
    value = optuna.create_study().ask({"x": distribution}).params["x"]
    seen = set()
    for _ in range(300):
        value = explored(distribution, value, random, resample)
        inner = distribution.to_internal_repr(value)
        assert distribution._contains(inner), value
        assert isinstance(value, int) == isinstance(distribution, optuna.distributions.IntDistribution)
        seen.add(value)
    is_choice = isinstance(distribution, optuna.distributions.CategoricalDistribution)
    assert (len(seen) > 1) == (not is_choice or resample > 0)


def test_the_first_parameters_follow_from_the_seed() -> None:
    def first(seed: int) -> list[dict[str, object]]:
        wanted = PopulationArguments(
            space={"x": {"low": 0.0, "high": 1.0}},
            rounds=3,
            ranks_per_member=2,
            direction="minimize",
            sampler=None,
            seed=seed,
            quantile=0.25,
            resample=0.25,
        )
        plan = population_of(wanted, [(0, 1, 2), (3, 4, 5)])
        assert sorted(rank for ranks in plan.ranks for rank in ranks) == list(range(6))
        return list(plan.first)

    assert first(1) == first(1) != first(2)
    with pytest.raises(ArgumentError, match=r"^seed='a': want a whole number, 0 or more"):
        first("a")  # type: ignore[arg-type]


def test_the_history_of_a_member_follows_its_copies() -> None:
    def at(member: int, number: int, value: float, source: int | None = None) -> RoundResult:
        return RoundResult(member=member, round=number, params={}, value=value, source=source)

    rounds = (at(0, 0, 5.0, 1), at(1, 0, 1.0), at(0, 1, 0.5), at(1, 1, 0.7, 0), at(0, 2, 0.4), at(1, 2, 0.3))
    found = PopulationResult(direction="minimize", rounds=rounds, failures={}, members=2)
    assert (found.best.member, found.best.value) == (1, 0.3)
    assert [each.member for each in found.history(1)] == [1, 0, 1]
    assert [each.member for each in found.history(0)] == [1, 0, 0]
    assert PopulationResult(direction="minimize", rounds=rounds, failures={1: "x"}, members=2).best.member == 0
    with pytest.raises(NoMemberError, match=r"none of 2 members has a value \(member 0: rank 0: OSError"):
        _ = PopulationResult(direction="minimize", rounds=(), failures={0: "rank 0: OSError"}, members=2).best


def test_the_first_ranks_of_hosts_hold_a_study_first() -> None:
    assert holding_order([(0, 1, 2)]) == (0, 1, 2)
    assert holding_order([(0, 1), (2, 3, 4), (5,)]) == (0, 2, 5, 1, 3, 4)

"""Which members of a population go on from which others, and with which parameters.

Source: Jaderberg et al., "Population based training of neural networks", arXiv:1711.09846: after each round, the worst
members copy the best ones (exploit), and go on with changed parameters (explore).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FACTORS = (0.8, 1.25)  # by which a number is multiplied


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberChange:
    """What a member does after a round that was too bad."""

    source: int  # the member whose state it copies
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BreedingRules:
    """How members change after a round."""

    is_minimized: bool  # whether small values are better
    quantile: float  # the share of members that change: above 0, and at most 0.5
    resample: float  # the probability that a parameter is drawn anew


def changes_after(
    values: Mapping[int, float],
    params: Mapping[int, Mapping[str, Any]],
    space: "Mapping[str, BaseDistribution]",
    random: Random,
    rules: BreedingRules,
) -> dict[int, MemberChange]:
    """Return the changes of the worst members, by member.

    As many members change as are in the quantile, at least one. Each copies one of as many best ones. NaN is worse
    than every number. A member never copies one that has NaN or the same value.

    Args:
        values: of each member that goes on.
        params: the parameters of each member.
        space: Optuna's distributions.
        random: all choices are its.
        rules: how many members change, and how far.
    """
    sign = 1 if rules.is_minimized else -1

    def rank_of(member: int) -> tuple[float, int]:
        value = values[member]
        return math.inf if math.isnan(value) else sign * value, member

    order = sorted(values, key=rank_of)
    # Rounded, because 0.29 * 100 is a little less than 29.
    count = min(max(1, int(round(rules.quantile * len(order), 9))), len(order) // 2)
    best, worst = order[:count], order[len(order) - count :]
    changes = {}
    for member in sorted(worst):
        source = random.choice(best)
        value = values[source]
        changed = {name: explored(space[name], old, random, rules.resample) for name, old in params[source].items()}
        if not math.isnan(value) and value != values[member]:
            changes[member] = MemberChange(source=source, params=changed)
    return changes


def explored(distribution: "BaseDistribution", value: Any, random: Random, resample: float) -> Any:
    """Return another value of a parameter near `value`, or with the probability `resample` any value.

    A choice stays if it is not drawn anew, and so does a number at the end of its range.
    """
    is_new = random.random() < resample
    choices: Sequence[Any] | None = getattr(distribution, "choices", None)
    if choices is not None:
        return random.choice(choices) if is_new else value
    bounds: Any = distribution
    if is_new or value == 0:  # a multiple of 0 is 0
        low, high = (math.log(each) if bounds.log else each for each in (bounds.low, bounds.high))
        drawn = random.uniform(low, high)
        return _fitted(bounds, math.exp(drawn) if bounds.log else drawn)
    factor = random.choice(FACTORS)
    found = _fitted(bounds, value * factor)
    if found == value and bounds.step is not None:  # the multiple is less than half a step away
        found = _fitted(bounds, value + math.copysign(bounds.step, value * (factor - 1)))
    return found


def _fitted(bounds: Any, value: float) -> Any:
    """Return the value of a range that is nearest to `value`."""
    if bounds.step is not None:
        value = bounds.low + round((value - bounds.low) / bounds.step) * bounds.step
    value = min(max(value, bounds.low), bounds.high)
    return int(value) if isinstance(bounds.low, int) and isinstance(bounds.step, int) else float(value)

"""How long a pipeline takes whose stages share cores: 1F1B, event by event."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# What is less than this of an action's work, in seconds, is rounding.
_LITTLE = 1e-12


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage takes for a microbatch, in seconds, while nobody disturbs it."""

    forward_s: float
    backward_s: float


def makespan(stages: Sequence[Stage], microbatches: int, cores: float, messages_s: Sequence[float]) -> float:
    """Return the seconds from the first forward to the last backward.

    A stage takes its actions in the order of torch's Schedule1F1B: as many forwards as stages are left, itself
    included; then a backward and a forward by turns; then the backwards that are left. Those that could run share
    `cores` evenly, and none has more than one.

    Args:
        stages: the first takes the input.
        microbatches: at least 1.
        cores: that the stages share, above 0; not necessarily whole.
        messages_s: what it takes from each stage to the next, and back: one less than there are stages.
    """
    orders = [_order(len(stages) - at, microbatches) for at in range(len(stages))]
    done: list[dict[tuple[bool, int], float]] = [{} for _ in stages]  # when each action ended
    left = [stage.forward_s for stage in stages]  # of the action each is at: first, a forward
    reached = [0] * len(stages)
    now = 0.0
    while any(at < len(order) for at, order in zip(reached, orders, strict=True)):
        running, next_arrival = [], math.inf
        for at, order in enumerate(orders):
            if reached[at] == len(order):
                continue
            ready_s = _ready(at, order[reached[at]], done, messages_s)
            if ready_s <= now + _LITTLE:
                running.append(at)
            else:
                next_arrival = min(next_arrival, ready_s)
        rate = min(1.0, cores / len(running)) if running else 1.0
        step = min([left[at] / rate for at in running] + [next_arrival - now])
        now += step
        for at in running:
            left[at] -= step * rate
            if left[at] > _LITTLE:
                continue
            done[at][orders[at][reached[at]]] = now
            reached[at] += 1
            if reached[at] < len(orders[at]):
                left[at] = _work(stages[at], orders[at][reached[at]])
    return now


def _order(warm: int, microbatches: int) -> list[tuple[bool, int]]:
    """Return the actions of a stage with `warm` forwards ahead: whether it is a forward, and of which microbatch."""
    warm = min(warm, microbatches)
    order = [(True, each) for each in range(warm)]
    for each in range(microbatches):
        order.append((False, each))
        if warm + each < microbatches:
            order.append((True, warm + each))
    return order


def _work(stage: Stage, action: tuple[bool, int]) -> float:
    return stage.forward_s if action[0] else stage.backward_s


def _ready(
    at: int,
    action: tuple[bool, int],
    done: Sequence[dict[tuple[bool, int], float]],
    messages_s: Sequence[float],
) -> float:
    """Return when what an action works on is there; infinity where that is not known yet."""
    is_forward, microbatch = action
    if is_forward:
        return 0.0 if at == 0 else done[at - 1].get(action, math.inf) + messages_s[at - 1]
    if at == len(messages_s):  # the last stage
        return done[at][True, microbatch]
    return done[at + 1].get(action, math.inf) + messages_s[at]

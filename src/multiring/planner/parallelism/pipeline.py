"""Simulate a 1F1B pipeline whose stages share cores, event by event."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Remaining work below this, in seconds, is a rounding error.
_LITTLE = 1e-12


@dataclass(frozen=True, slots=True)
class StageTime:
    """The seconds that a stage takes for a microbatch while it has a core for itself."""

    forward_s: float
    backward_s: float


def makespan(stages: Sequence[StageTime], microbatches: int, cores: float, messages_s: Sequence[float]) -> float:
    """Return the seconds from the first forward to the last backward.

    A stage takes its actions in the order of torch's Schedule1F1B: first as many forwards as there are stages left,
    itself included; then alternately a backward and a forward; then the remaining backwards. The stages that can run
    share `cores` evenly, and no stage uses more than one core.

    Args:
        stages: all stages; the first one takes the input.
        microbatches: at least 1.
        cores: the number of cores that the stages share, above 0; it may be a fraction.
        messages_s: the seconds of a message between each stage and the next one: one entry less than stages.
    """
    orders = [_order(len(stages) - at, microbatches) for at in range(len(stages))]
    done: list[dict[tuple[bool, int], float]] = [{} for _ in stages]  # when each action ended
    left = [stage.forward_s for stage in stages]  # remaining seconds of each stage's present action, at first a forward
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
    """Return a stage's actions with `warm` forwards at the start: (whether it is a forward, microbatch) each."""
    warm = min(warm, microbatches)
    order = [(True, each) for each in range(warm)]
    for each in range(microbatches):
        order.append((False, each))
        if warm + each < microbatches:
            order.append((True, warm + each))
    return order


def _work(stage: StageTime, action: tuple[bool, int]) -> float:
    return stage.forward_s if action[0] else stage.backward_s


def _ready(
    at: int,
    action: tuple[bool, int],
    done: Sequence[dict[tuple[bool, int], float]],
    messages_s: Sequence[float],
) -> float:
    """Return the time at which an action's input has arrived; infinity if the time is not known yet."""
    is_forward, microbatch = action
    if is_forward:
        return 0.0 if at == 0 else done[at - 1].get(action, math.inf) + messages_s[at - 1]
    if at == len(messages_s):  # the last stage
        return done[at][True, microbatch]
    return done[at + 1].get(action, math.inf) + messages_s[at]

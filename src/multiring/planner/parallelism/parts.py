"""Group a model's units: into groups that are gathered at once, and into the stages of a pipeline.

Both the forecast and the implementation use these groups.
"""

from collections.abc import Sequence

from multiring.errors import ArgumentError
from multiring.planner.parallelism.profile import Unit

# Smaller units are gathered with the rest of the model, once a step, because a collective for each would cost more.
GATHERED_LEAST_BYTES = 1 << 18


def gathered_together(units: Sequence[Unit]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of units whose parameters are gathered together.

    The first group, which may be empty, is the rest of the model. This group stays gathered until backward has ended.
    """
    large = [index for index, unit in enumerate(units) if unit.parameter_bytes >= GATHERED_LEAST_BYTES]
    rest = tuple(index for index in range(len(units)) if index not in set(large))
    return (rest, *((index,) for index in large))


def stages_of(units: Sequence[Unit], stages: int) -> tuple[range, ...]:
    """Return the units of each stage, so that the slowest stage takes as little time as possible.

    Stages are consecutive units, and every stage has parameters. Among equal solutions, take the one whose largest
    stage has the fewest bytes of parameters. This is dynamic programming over (units, stages).

    Raises:
        ArgumentError: there are fewer units with parameters than stages.
    """
    if sum(unit.parameter_bytes > 0 for unit in units) < stages:
        raise ArgumentError(f"{stages} stages of {len(units)} units: want a unit with parameters for each stage")
    seconds, held = [0.0], [0]
    for unit in units:
        seconds.append(seconds[-1] + unit.seconds)
        held.append(held[-1] + unit.parameter_bytes)
    count = len(units)
    # best[end], for the units before end: (seconds of the slowest stage, bytes of the largest, first units of stages)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {
        end: (seconds[end], held[end], (0,)) for end in range(1, count + 1) if held[end]
    }
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (
                    max(best[begin][0], seconds[end] - seconds[begin]),
                    max(best[begin][1], held[end] - held[begin]),
                    (*best[begin][2], begin),
                )
                for begin in best
                if begin < end and held[begin] < held[end]
            )
            for end in range(stage, count + 1)
            if any(begin < end and held[begin] < held[end] for begin in best)
        }
    begins = (*best[count][2], count)
    return tuple(range(begin, end) for begin, end in zip(begins, begins[1:]))  # noqa: B905, RUF007 -- shifted

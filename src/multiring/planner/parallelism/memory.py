"""Forecast the memory that a mix needs in a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring.planner.parallelism.axes import Axis, Parallelism
from multiring.planner.parallelism.parts import gathered_together, stages_of
from multiring.planner.parallelism.profile import Profile, Unit

_FLAT_COPIES = 3  # buffers of the largest gathered group's size: parameters, gradients, and messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory in bytes of the rank that needs most memory.

    `states` are the parameters, their gradients and the optimizer's states. `activations` are the tensors that autograd
    saves until backward. `gathered` are parts of other ranks that this rank stores for a while.
    """

    states: float
    activations: float
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.states + self.activations + self.gathered


def memory_of(parallelism: Parallelism, profile: Profile) -> Memory:
    """Return the memory, under `parallelism`, of the rank that needs most memory.

    States are exact if parts divide evenly. Activations are those of a step without recomputing. On a tensor axis they
    are an overestimate, because each rank is assumed to keep all activations.
    """
    units, copies = profile.units, 2 + profile.optimizer_states
    share = profile.batch / parallelism.data_ranks
    kept = sum(unit.saved_bytes for unit in units) * share
    if parallelism.size(Axis.SHARD) > 1:
        rest, *groups = (_bytes_of(units, group) for group in gathered_together(units))
        return Memory(
            states=copies * profile.parameter_bytes / parallelism.size(Axis.SHARD),
            activations=kept,
            gathered=_FLAT_COPIES * (rest + max(groups, default=0)),
        )
    if parallelism.size(Axis.TENSOR) > 1:
        split = sum(unit.split_bytes for unit in units)
        own = profile.parameter_bytes - split + split / parallelism.size(Axis.TENSOR)
        return Memory(states=copies * own, activations=kept)
    if parallelism.size(Axis.PIPELINE) > 1:
        stages = stages_of(units, parallelism.size(Axis.PIPELINE))
        held = [_stage(units, stage, len(stages) - at, parallelism, profile) for at, stage in enumerate(stages)]
        return max(held, key=lambda memory: memory.total)
    return Memory(states=copies * profile.parameter_bytes, activations=kept)


def _stage(units: Sequence[Unit], stage: range, ahead: int, parallelism: Parallelism, profile: Profile) -> Memory:
    # In 1F1B, a stage's forward is ahead of its backward. The lead in microbatches is the number of stages from this
    # stage to the last one.
    samples = profile.batch / parallelism.data_ranks / parallelism.microbatches * min(ahead, parallelism.microbatches)
    return Memory(
        states=(2 + profile.optimizer_states) * _bytes_of(units, stage),
        activations=sum(units[index].saved_bytes for index in stage) * samples,
    )


def _bytes_of(units: Sequence[Unit], indices: Sequence[int]) -> int:
    return sum(units[index].parameter_bytes for index in indices)

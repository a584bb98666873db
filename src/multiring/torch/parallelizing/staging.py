"""A pipeline stage of a model, with torch.distributed.pipelining's 1F1B schedule."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from multiring.planner.parallelism import Unit, stages_of
from multiring.torch.parallelizing.anatomy import ModelUnit

Loss = Callable[[Any, Tensor], Tensor]
Made = Mapping[str, tuple[torch.Size, torch.dtype] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a sequence of parts is cut into pipeline stages.

    Attributes:
        parts: the parts of the model, in order.
        units: their measurements.
        made: shape and type of each part's output for one sample.
        group: the ranks of the pipeline.
        samples: number of samples of a rank's part of the batch.
        microbatches: number of microbatches into which these samples are cut.
    """

    parts: Sequence[ModelUnit]
    units: Sequence[Unit]
    made: Made
    group: dist.ProcessGroup
    samples: int
    microbatches: int


class ModelStage:
    """This rank's stage of a model.

    It replaces all other parts of the model by nn.Identity.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], cut: Cut) -> None:
        ranges = stages_of(cut.units, cut.group.size())
        own = ranges[cut.group.rank()]
        for index, part in enumerate(cut.parts):
            if index not in own:
                model.set_submodule(part.name, nn.Identity())
        count = cut.samples // cut.microbatches
        given = tuple(each[:count].to("meta") for each in inputs)
        if own[0]:
            given = (_like(cut, own[0] - 1, count),)
        self._stage = PipelineStage(
            MiddleStage(model, receives=own[0] > 0),
            cut.group.rank(),
            cut.group.size(),
            torch.device("cpu"),
            input_args=given,
            output_args=_like(cut, own[-1], count),
            group=cut.group,
        )
        self._microbatches = cut.microbatches
        self._schedule: tuple[Loss, Schedule1F1B] | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return bool(self._stage.is_last)

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor, loss: Loss) -> Tensor | None:
        """Run forward and backward of all microbatches.

        Return the mean loss on the last stage, and None on the others. Gradients add up over microbatches and steps.
        """
        if self._schedule is None or self._schedule[0] is not loss:
            self._schedule = (loss, self._scheduled(loss))
        schedule = self._schedule[1]
        losses: list[Tensor] = []
        if self._stage.is_first:
            schedule.step(*inputs, return_outputs=False)
        elif self._stage.is_last:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        return torch.stack([each.detach() for each in losses]).sum() if losses else None

    def _scheduled(self, loss: Loss) -> Schedule1F1B:
        count = self._microbatches

        def part(made: Any, targets: Tensor) -> Tensor:
            return loss(made, targets) / count

        # By default, torch divides all of `.grad` after each step, including the gradients of earlier steps. Before
        # 2.5, torch divided nothing.
        divides = "scale_grads" in inspect.signature(Schedule1F1B.__init__).parameters
        options: dict[str, Any] = {"scale_grads": False} if divides else {}
        return Schedule1F1B(self._stage, count, loss_fn=part, **options)


class MiddleStage(nn.Module):
    """A stage that leaves its inputs unchanged, and sends dense tensors."""

    def __init__(self, stage: nn.Module, *, receives: bool) -> None:
        super().__init__()
        self.stage = stage
        self._receives = receives

    def forward(self, *given: Tensor) -> Tensor:
        """Run the stage on copies of received tensors.

        The stage's first operation may change them in place.
        """
        made: Tensor = self.stage(*((each.clone() for each in given) if self._receives else given))
        if torch.is_grad_enabled() and made.is_floating_point() and not made.requires_grad:
            made.requires_grad_()  # torch sends gradients back to each stage, even if no earlier stage is trained
        return made.contiguous()


def _like(cut: Cut, index: int, count: int) -> Tensor:
    """Return a meta tensor with the shape and type of part `index`'s output for `count` samples."""
    made = cut.made[cut.parts[index].name]
    if made is None:
        raise AssertionError(f"stage {cut.parts[index].name} returns no single tensor, so it cannot be in a pipeline")
    shape, dtype = made
    return torch.empty(count, *shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

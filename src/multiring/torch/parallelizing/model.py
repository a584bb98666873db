"""A model on many ranks. Its step is the same call under each parallelism."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from multiring.errors import ArgumentError, UnsupportedError
from multiring.planner.parallelism import Axis, Forecast, Parallelism
from multiring.torch.parallelizing.building import average_gradients, settle_gradients
from multiring.torch.parallelizing.checkpoints import load_whole_state, whole_state
from multiring.torch.parallelizing.first_batch import compare_first_batch
from multiring.torch.parallelizing.held import Held, as_part, is_dtensor, mark_module
from multiring.torch.parallelizing.staging import Loss, ModelStage


@final
class ParallelModel:
    """A model that `parallelize` has put on the ranks.

    Each batch is cut into `data_ranks` equal parts, and this rank trains on the part with the number `data_rank`.

    Attributes:
        module: this rank's part: its stage under a pipeline, otherwise the whole model, whose parameters may be
            divided.
        mesh: the DeviceMesh.
        parallelism: the axes of the mesh, and their order on the ranks.
        forecasts: the forecasts of all possible parallelisms, best first.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        forecasts: list[Forecast],
        parallelism: Parallelism,
        batch: int,
        stage: ModelStage | None,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.parallelism = parallelism
        self.forecasts = forecasts
        self.data_ranks = parallelism.data_ranks
        self.data_rank = self._data_rank()
        self._samples = batch // parallelism.data_ranks
        self._stage = stage
        self._has_compared = False
        self._trained = self._trained_now()
        self._held = Held(
            parallelism=str(parallelism),
            stages=mesh.get_group(Axis.PIPELINE.value) if parallelism.size(Axis.PIPELINE) > 1 else None,
            is_sharded=parallelism.size(Axis.SHARD) > 1,
            is_divided=parallelism.size(Axis.TENSOR) > 1,
        )
        mark_module(self.plain_module, self._held)
        # Here torch does not average gradients by itself.
        by_hand = parallelism.size(Axis.DATA) > 1 and (
            parallelism.size(Axis.TENSOR) > 1 or parallelism.size(Axis.PIPELINE) > 1
        )
        self._averaged_over = mesh.get_group(Axis.DATA.value) if by_hand else None

    @property
    def plain_module(self) -> nn.Module:
        """This rank's part of the model, with the parameter names of the whole model."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank's optimizer has to update."""
        yield from self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same parameters with their names in the whole model."""
        yield from self.plain_module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, as in one process. Every rank calls it."""
        return whole_state(self.plain_module, self._held)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the whole model; each rank takes its part.

        Every rank calls it.

        Raises:
            ArgumentError: the state belongs to a different model.
        """
        load_whole_state(self.plain_module, self._held, state)

    def share(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's part of a batch of all ranks.

        Raises:
            ArgumentError: the samples cannot be cut into `data_ranks` equal parts.
        """
        if any(each.shape[0] % self.data_ranks for each in batch):
            raise ArgumentError(
                f"{[each.shape[0] for each in batch]} samples: want a multiple of {self.data_ranks}, the number of "
                "ranks that have samples of their own; leave the last batch out if it is smaller (drop_last=True)"
            )
        return tuple(each.chunk(self.data_ranks)[self.data_rank] for each in batch)

    def step(self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor, loss: Loss) -> Tensor:
        """Run forward and backward on this rank's part; return the whole batch's loss.

        Afterwards, gradients are those of the whole batch. They add up from step to step, until the optimizer or
        its `zero_grad` clears them. To accumulate several steps, divide the loss by their number, as in one process.

        Args:
            inputs: this rank's part of the batch (see `share`). All ranks with one `data_rank` must pass the same part.
            targets: the targets of these samples.
            loss: a function of the model's output and the targets that returns the mean over samples. Pass the same
                function object in each step.

        Raises:
            ArgumentError: a parameter's requires_grad was changed under a data axis; or a pipeline was planned for
                another number of samples; or the parts of the batch differ in size, which every rank reports. Discard
                the gradients then.
            MismatchError: in the first step, ranks of one `data_rank` have different samples. Every rank raises it.
            UnsupportedError: a stage of a pipeline has no gradient.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        self._refuse_other_parameters()
        if not self._has_compared:
            self._has_compared = True
            compare_first_batch((given, targets), self.data_rank, self.data_ranks, self._held.parallelism)
        if self._stage is None:
            found = loss(self.module(*given), targets)
            torch.autograd.backward(found)
            own: Tensor | None = found.detach()
        else:
            self._refuse_other(given[0].shape[0])
            own = self._stage.step(given, targets, loss)
        if self._averaged_over is not None:
            average_gradients(self.module.parameters(), self._averaged_over)
        told = self._mean(own, given[0].shape[0])
        self._mark_gradients()
        return told

    def _mean(self, own: Tensor | None, samples: int) -> Tensor:
        """Return the mean loss over the ranks that have one; `own` is None on the others."""
        is_idle = not any(each.grad is not None for each in self.module.parameters())
        told = torch.tensor([0.0, 0.0, samples, samples**2, is_idle], dtype=torch.float64)
        if own is not None:
            told[0], told[1] = own.to(torch.float64), 1.0
        dist.all_reduce(told)
        ranks = dist.get_world_size()
        if ranks * told[3] != told[2] ** 2:
            raise ArgumentError(
                f"step with {samples} samples on rank {dist.get_rank()}, but {told[2] / ranks:g} on average: want "
                "equally many on all ranks, as share() gives them; leave the last batch out if it is smaller "
                "(drop_last=True)"
            )
        if self._held.stages is not None and told[4]:
            raise UnsupportedError(
                f"{self._held.parallelism}: {int(told[4])} ranks hold a stage without a gradient, and the other ranks "
                "would wait for the norm; want a trained parameter in each stage, or another mesh"
            )
        return told[0] / told[1]

    def _mark_gradients(self) -> None:
        """Mark gradients that are only a part of the model's, for torch functions that cannot detect it."""
        settle_gradients(self.module.parameters())
        if self._held.stages is None and not self._held.is_divided:
            return
        for each in self.module.parameters():
            if each.grad is not None and not is_dtensor(each.grad):
                each.grad = as_part(each.grad, self._held)

    def _refuse_other(self, samples: int) -> None:
        if samples != self._samples:
            raise ArgumentError(
                f"{samples} samples on rank {dist.get_rank()}: want {self._samples}, as in the sample that the "
                "pipeline was built for"
            )

    def _trained_now(self) -> list[str]:
        return [name for name, each in self.plain_module.named_parameters() if each.requires_grad]

    def _refuse_other_parameters(self) -> None:
        """Raise ArgumentError if requires_grad has changed since DistributedDataParallel took the parameters."""
        if isinstance(self.module, DistributedDataParallel) and (now := self._trained_now()) != self._trained:
            name = min(set(now) ^ set(self._trained))
            raise ArgumentError(
                f"requires_grad of {name} was changed after parallelize, under {self._held.parallelism}, but ranks "
                "only average the gradients of the parameters that were trained then: set it before parallelize, or "
                "leave it unchanged and pass only the parameters to train to the optimizer"
            )

    def _data_rank(self) -> int:
        found = 0
        for axis in (Axis.DATA, Axis.SHARD):
            if self.parallelism.size(axis) > 1:
                found = found * self.parallelism.size(axis) + self.mesh.get_local_rank(axis.value)
        return found

    def __repr__(self) -> str:
        return (
            f"ParallelModel({self.parallelism}, rank {dist.get_rank()} has part {self.data_rank} of {self.data_ranks})"
        )

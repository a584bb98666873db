"""`parallelize`: build the parallelism with the shortest training step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from multiring._topology import Topology

if TYPE_CHECKING:  # imported at the call, because it takes half a second and few programs need it
    from multiring.torch.parallelizing.model import ParallelModel


def parallelize(
    model: nn.Module,
    sample: Tensor | tuple[Tensor, ...],
    mesh: str | Mapping[str, int] = "auto",
    *,
    memory_bytes: float | None = None,
    optimizer_states: int = 2,
    topology: Topology | None = None,
) -> "ParallelModel":
    """Put `model` on all ranks in the parallelism with the shortest forecast step.

    The call measures the model, forecasts memory and time of each mix of data, sharded, tensor and pipeline
    parallelism, prints the forecasts on rank 0, and applies the best mix. It changes the model and gives every rank
    rank 0's parameters. Every rank of torch.distributed calls it. docs/parallelize.md describes the choices.

    Args:
        model: the whole model, in host memory, on every rank.
        sample: the model's inputs for one step of all ranks together, the same on all ranks. The first dimension of
            each tensor counts its samples.
        mesh: "auto", or the axes to take and their sizes, like {"data": 2, "tensor": 2}.
        memory_bytes: limit of a rank's memory for the model, its gradients, the optimizer's state and activations; None
            means no limit.
        optimizer_states: memory of the optimizer in multiples of the parameters' memory: 0 for SGD, 1 with momentum, 2
            for Adam.
        topology: the hosts of the ranks and the costs of links; by default the topology that multiring has detected.

    Returns:
        The model on the ranks, whose `step` runs forward and backward.

    Raises:
        StateError: torch.distributed has no process group.
        ArgumentError: `sample` is no batch; `mesh` is impossible for this model; or no mix fits into `memory_bytes`.
        UnsupportedError: the model is not in host memory.
    """
    from multiring.torch.parallelizing.deciding import decide, look, refuse_what_cannot_be  # noqa: PLC0415

    refuse_what_cannot_be(mesh)
    inputs = sample if isinstance(sample, tuple) else (sample,)
    return decide(model, mesh, look(model, inputs, memory_bytes, optimizer_states, topology))

"""`parallelize`: the mix of data, sharded, tensor and pipeline parallelism in which a step takes least."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from multiring.topology import Topology

if TYPE_CHECKING:  # what it stands on is imported when it is called: half a second of torch that few programs need
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
    """Put `model` on all ranks of torch.distributed in the way in which its training step is expected to take least.

    Measures the model here, forecasts memory and time of each mix of axes, prints them on rank 0, and applies one. The
    model is changed; every rank gets the parameters of rank 0. docs/parallelize.md has what is chosen among, and how.
    Every rank calls it.

    Args:
        model: the whole of it, in host memory, on every rank.
        sample: what the model is given for the batch that all ranks together train on in one step, the same on all
            ranks; the first dimension of every tensor counts its samples.
        mesh: "auto", or the axes to take and their sizes, like {"data": 2, "tensor": 2}.
        memory_bytes: what a rank may hold of the model, its gradients, the optimizer's state and activations; by
            default there is no limit.
        optimizer_states: how many times the parameters' memory the optimizer keeps: 0 for SGD, 1 with momentum, 2 for
            Adam.
        topology: where the ranks are and what links cost; by default what multiring knows.

    Raises:
        StateError: torch.distributed has no process group.
        ArgumentError: `sample` is no batch; `mesh` cannot be had; no mix fits into `memory_bytes`.
        UnsupportedError: the model is not in host memory.
    """
    from multiring.torch.parallelizing.deciding import decide, look, refuse_what_cannot_be  # noqa: PLC0415

    refuse_what_cannot_be(mesh)
    inputs = sample if isinstance(sample, tuple) else (sample,)
    return decide(model, mesh, look(model, inputs, memory_bytes, optimizer_states, topology))

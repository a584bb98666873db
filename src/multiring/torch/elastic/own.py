"""The parts of a torch optimizer's state of which each rank has its own."""

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.elastic.own import OwnPart, RankChange
from multiring._frontend.elastic.snapshot import add_viewer
from multiring._gradients.compression_state import KEY
from multiring.torch.gradients.distributed import averages, residuals_of, set_residuals
from multiring.torch.interop import dtype_name, dtype_of
from multiring.torch.optim.shampoo import Shampoo


def parts_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, OwnPart]:
    """Return the parts of an optimizer's state of which each rank has its own, by name."""
    found: dict[str, OwnPart] = {}
    if isinstance(optimizer, Shampoo) and optimizer.own_blocks() is not None:
        found["blocks"] = _Blocks(optimizer)
    if residuals_of(optimizer) is not None:
        found["residuals"] = _Residuals(optimizer)
    return found


def without_blocks(optimizer: torch.optim.Optimizer, *, is_wanted: bool) -> AbstractContextManager[Any]:
    """Leave the blocks of a Shampoo out of its state_dict in the block, if they are own parts."""
    if is_wanted and isinstance(optimizer, Shampoo) and optimizer.own_blocks() is not None:
        return optimizer.without_blocks()
    return nullcontext()


def without_residuals(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state_dict of an optimizer without the residuals of this rank."""
    if KEY not in state:
        return dict(state)
    return {**state, KEY: {name: value for name, value in state[KEY].items() if name != "residuals"}}


class _Blocks:
    """The blocks of a Shampoo. All ranks take all blocks, and each keeps its new ones at the next step."""

    is_vital = True

    def __init__(self, optimizer: Shampoo) -> None:
        self._optimizer = optimizer

    def read(self) -> Any:
        """Return this rank's blocks."""
        return self._optimizer.own_blocks()

    def write(self, values: Mapping[int, Any], change: RankChange) -> None:
        """Set the blocks of the ranks that there are."""
        blocks = {key: value for each in values.values() for key, value in each.items()}
        self._optimizer.load_blocks(blocks, are_all=len(values) == change.former_size)


class _Residuals:
    """What a rank has not sent yet of its gradients."""

    is_vital = False  # the next gradients are a little off without

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def read(self) -> Any:
        """Return the residuals by the parameter's number."""
        return residuals_of(self._optimizer)

    def write(self, values: Mapping[int, Any], change: RankChange) -> None:
        """Set the residuals."""
        found = residuals_now(values, change, averages=averages(self._optimizer))
        own = residuals_of(self._optimizer) or {}
        set_residuals(self._optimizer, {at: found.get(at, torch.zeros_like(each)) for at, each in own.items()})


def residuals_now(
    values: Mapping[int, Mapping[int, Tensor]], change: RankChange, *, averages: bool
) -> dict[int, Tensor]:
    """Return this rank's residuals by the parameter's number, after the ranks have changed.

    The first rank takes those of the ranks that are gone, too. The residuals of all ranks count as much in the next
    gradients as they would have: in an average they are multiplied by the number of ranks now over that before.

    Args:
        values: the residuals of each rank at the commit; a newcomer has none.
        change: where the ranks are now.
        averages: whether gradients are averaged, not summed.
    """
    ranks = [] if change.own is None else [change.own]
    first = next((rank for rank, former in enumerate(change.former) if former is not None), 0)
    ranks += change.gone if change.rank == first else []
    scale = change.size / change.former_size if averages else 1.0
    found: dict[int, Tensor] = {}
    for rank in ranks:
        for at, each in values.get(rank, {}).items():
            found[at] = each * scale if at not in found else found[at] + each * scale
    return found


def _view(value: Any) -> Any:
    """Return the form of a dense tensor with its memory; NotImplemented for other objects."""
    if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_conj():
        return NotImplemented
    data = value.detach().cpu().contiguous().resolve_neg()
    memory: Any = data.reshape(-1).view(torch.uint8).numpy()
    form = dtype_name(value.dtype), tuple(value.shape), str(value.device), value.requires_grad and value.is_leaf
    return _tensor, (pickle.PickleBuffer(memory), *form)


def _tensor(memory: Any, dtype: str, shape: tuple[int, ...], device: str, is_trained: bool) -> Tensor:  # noqa: FBT001 -- from a pickle
    flat = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype_of(dtype)).view(shape).to(device).requires_grad_(is_trained)


add_viewer(_view)

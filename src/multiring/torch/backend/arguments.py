"""What callers of a process group may hand over: one tensor or a list of one, and lists of a tensor for each rank."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from multiring.torch.backend.buffers import require_host
from multiring.torch.tensors import described, dtype_name


def one_of(what: str, tensors: Any) -> Tensor:
    """Return the one tensor that `tensors` is, or has.

    Raises:
        ValueError: it has none, or several.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{what}: got {len(tensors)} tensors; want one")
    found: Tensor = tensors[0]
    return found


def blocks_of(what: str, tensors: Any, ranks: int) -> Sequence[Tensor]:
    """Return the list of a tensor for each rank that `tensors` is, or has; they may differ in size only.

    Raises:
        ValueError: too many or too few, or of different types.
    """
    blocks = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    if len(blocks) != ranks:
        raise ValueError(f"{what}: got a list of {len(blocks)} tensors; want one for each of the {ranks} ranks")
    for block in blocks:
        require_host(what, block)
        if block.dtype is not blocks[0].dtype:
            raise ValueError(
                f"{what}: a list has {dtype_name(blocks[0].dtype)} and {dtype_name(block.dtype)}; want one type"
            )
    found: Sequence[Tensor] = blocks
    return found


def require_like(what: str, one: Tensor, other: Tensor) -> None:
    """Raise ValueError unless two tensors of this rank have one type and as many elements."""
    require_host(what, one)
    if one.dtype is not other.dtype or one.numel() != other.numel():
        raise ValueError(
            f"{what}: this rank's tensor is {described(one)}, its place in the list {described(other)}; want the same "
            "type and as many elements"
        )


def require_rank(what: str, name: str, value: int, ranks: int) -> None:
    """Raise ValueError unless `value` is a rank of the group."""
    if not 0 <= value < ranks:
        raise ValueError(f"{what}: invalid {name} rank {value}; want 0 to {ranks - 1}, as the group numbers its ranks")


def require_as_many(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise ValueError unless there are as many outputs as inputs, and at least one."""
    if not outputs or len(outputs) != len(inputs):
        raise ValueError(f"{what}: got {len(outputs)} outputs for {len(inputs)} inputs; want as many, and at least one")

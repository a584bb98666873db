"""Check the arguments of a process group's operations: single tensors, and lists with a tensor for each rank."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend

from multiring.torch.c10d.buffers import require_host
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.interop import described, dtype_name


def one_of(what: str, tensors: Any) -> Tensor:
    """Return the tensor if `tensors` is a tensor or a list of one tensor.

    Raises:
        RefusedError: the list is empty, or has several tensors.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise RefusedError(f"{what}: got {len(tensors)} tensors; want one")
    found: Tensor = tensors[0]
    return found


def timeout_of(what: str, options: Any) -> float | None:
    """Return the timeout in seconds of torch's options of a process group; None without options.

    Raises:
        RefusedError: the options are of another backend.
    """
    if options is None:
        return None
    if type(options) is not Backend.Options or options.backend != "multiring":
        name = type(options).__qualname__
        raise RefusedError(
            f"{what} is a {name}; multiring takes no options but a Backend.Options('multiring', timeout)"
        )
    seconds: float = options._timeout.total_seconds()  # noqa: SLF001 -- torch itself reads it so
    return seconds


def alike(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise RefusedError unless the tensors that one rank passes to one operation have the same type and size."""
    for each in tensors:
        require_host(what, each)
        if each.dtype is not tensors[0].dtype:
            raise RefusedError(
                f"{what}: invalid tensor type: this rank's tensors are {dtype_name(tensors[0].dtype)} and "
                f"{dtype_name(each.dtype)}; want one type"
            )
        if each.shape != tensors[0].shape:
            raise RefusedError(
                f"{what}: invalid tensor size: this rank's tensors are of shape {tuple(tensors[0].shape)} and "
                f"{tuple(each.shape)}; want one size"
            )


def blocks_of(what: str, tensors: Any, ranks: int) -> Sequence[Tensor]:
    """Return the list with a tensor for each rank. torch may wrap this list in another list.

    The tensors may differ in size only.

    Raises:
        RefusedError: the number of tensors is wrong, or their types differ.
    """
    blocks = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    if len(blocks) != ranks:
        raise RefusedError(f"{what}: got a list of {len(blocks)} tensors; want one for each of the {ranks} ranks")
    for block in blocks:
        require_host(what, block)
        if block.dtype is not blocks[0].dtype:
            raise RefusedError(
                f"{what}: a list has {dtype_name(blocks[0].dtype)} and {dtype_name(block.dtype)}; want one type"
            )
    found: Sequence[Tensor] = blocks
    return found


def require_like(what: str, one: Tensor, other: Tensor) -> None:
    """Raise RefusedError unless two tensors of this rank have the same type and number of elements."""
    require_host(what, one)
    if one.dtype is not other.dtype or one.numel() != other.numel():
        raise RefusedError(
            f"{what}: this rank's tensor is {described(one)}, its place in the list {described(other)}; want the same "
            "type and number of elements"
        )


def require_rank(what: str, name: str, value: int, ranks: int) -> None:
    """Raise RefusedError unless `value` is a rank of the group."""
    if not 0 <= value < ranks:
        raise RefusedError(f"{what}: invalid {name} rank {value}; want 0 to {ranks - 1}, a rank's number in the group")


def require_as_many(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise RefusedError unless the numbers of outputs and inputs are equal, and at least one."""
    if not outputs or len(outputs) != len(inputs):
        raise RefusedError(
            f"{what}: got {len(outputs)} outputs for {len(inputs)} inputs; want equal numbers, and at least one"
        )

"""Draw random tensors of every type and layout for calls.py."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.support.cases import Random
from torch import Tensor, nn

Shape = tuple[int, ...]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*SIGNED, *UNSIGNED)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2)  # types that collectives move but do not reduce
COMBINED = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
JUNK = 1


class Tagged(Tensor):
    """A tensor subclass, as programs define them."""


# ---- layouts ----


def _strided(values: Tensor) -> Tensor:
    wide = torch.zeros((*values.shape, 2), dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def _transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def _sliced(values: Tensor) -> Tensor:
    flat = torch.zeros(values.numel() + 5, dtype=values.dtype)
    flat[3 : 3 + values.numel()] = values.reshape(-1)
    return flat[3 : 3 + values.numel()].view(values.shape)


def _expanded(values: Tensor) -> Tensor:
    return values[:1].clone().expand(values.shape)


def _overlapping(values: Tensor) -> Tensor:
    flat = values.reshape(-1).clone()
    return flat.as_strided((values.numel() - 1, 2), (1, 1))[: values.shape[0]]


def _channels_last(values: Tensor) -> Tensor:
    return values.clone().contiguous(memory_format=torch.channels_last)


def _graph(values: Tensor) -> Tensor:
    return values.clone().requires_grad_(True) * 1


def _inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


def _shared(values: Tensor) -> Tensor:
    found = values.clone()
    found.share_memory_()  # type: ignore[no-untyped-call] # torch's own
    return found


def _always(_shape: Shape, _kind: torch.dtype) -> bool:
    return True


def _has_gradient(_shape: Shape, kind: torch.dtype) -> bool:
    return kind in FLOATS or kind in COMPLEX


# The layouts: a function that gives values this layout, and a condition on shape and type.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Shape, torch.dtype], bool]]] = {
    "plain": (torch.clone, _always),
    "strided": (_strided, _always),
    "transposed": (_transposed, lambda shape, _kind: len(shape) > 1),
    "sliced": (_sliced, _always),
    "channels last": (_channels_last, lambda shape, _kind: len(shape) == 4),
    "tagged": (lambda values: values.clone().as_subclass(Tagged), _always),
    "parameter": (lambda values: nn.Parameter(values.clone()), _has_gradient),
    "shared": (_shared, lambda shape, _kind: 0 not in shape),
    "neg": (lambda values: torch._neg_view(-values), lambda _shape, kind: kind in FLOATS),  # noqa: SLF001
    # The following layouts are for arguments that are only read.
    "inference": (_inference, _always),
    "graph": (_graph, _has_gradient),
    "conj": (lambda values: values.conj().resolve_conj().conj(), lambda _shape, kind: kind in COMPLEX),
    "expanded": (_expanded, lambda shape, _kind: bool(shape) and shape[0] > 1 and 0 not in shape),
    "overlapping": (_overlapping, lambda shape, _kind: len(shape) == 2 and shape[1] == 2 and shape[0] > 1),
}
READ_ONLY = {"inference", "graph", "conj", "expanded", "overlapping"}


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous plain tensor with the elements of `tensor`."""
    with torch.no_grad():
        found = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.frombuffer(bytearray(_bytes(found)), dtype=found.dtype).view(found.shape) if found.numel() else found


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.as_subclass(Tensor).reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and elements.

    +0 and -0 are equal.
    """
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    first, second = plain(one), plain(other)
    if first.dtype in MOVED:
        first, second = first.float(), second.float()
    return torch.equal(first, second)


# ---- expected results ----


def reduced(op: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the reduction of these tensors, computed in Python integers or float64."""
    kind = parts[0].dtype
    if kind.is_floating_point or kind.is_complex:
        wide = [plain(each).to(torch.complex128 if kind.is_complex else torch.float64) for each in parts]
        steps: dict[str, Any] = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}
        found: Tensor = functools.reduce(steps.get(op, torch.add), wide)
        return (found / len(parts) if op == "average" else found).to(kind)
    stacked = np.stack([plain(each).numpy().astype(object) for each in parts])
    if kind is torch.bool:
        counts = stacked.sum(0)
        by_count = {"sum": counts > 0, "max": counts > 0, "or": counts > 0, "xor": counts % 2}
        return torch.from_numpy(np.asarray(by_count.get(op, counts == len(parts)), bool))
    folds: dict[str, Callable[[Any, Any], Any]] = {
        "product": lambda a, b: a * b,
        "min": np.minimum,
        "max": np.maximum,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    whole = np.asarray(functools.reduce(folds.get(op, lambda a, b: a + b), list(stacked)), object)
    if op == "average":
        whole = divided(whole, len(parts))
    return integers(whole, kind)


def divided(whole: Any, by: int) -> Any:
    """Return an array of Python integers divided by `by`, rounded toward zero."""
    return np.vectorize(lambda value: abs(int(value)) // by * (1 if value >= 0 else -1), otypes=[object])(
        np.asarray(whole, object)
    )


def integers(whole: Any, kind: torch.dtype) -> Tensor:
    """Return an array of Python integers as a tensor; values outside the type wrap."""
    # arithmetic turns a zero-dimensional array into a number, for which NumPy would choose 64 bits
    whole = np.asarray(whole, object)
    bits, name = 8 * kind.itemsize, str(kind).removeprefix("torch.")
    wrapped = np.vectorize(lambda value: int(value) % (1 << bits), otypes=[object])(whole) if whole.size else whole
    return torch.from_numpy(wrapped.astype(f"uint{bits}").view(name).reshape(whole.shape).copy())


# ---- the tensors of a case ----


@dataclass
class Case:
    """The tensors of one call on all ranks.

    Each rank can draw the tensors of every other rank.
    """

    entropy: int
    kind: torch.dtype
    ranks: Sequence[int]  # the numbers of the group's ranks in the whole job
    rank: int  # this rank's number in the whole job
    is_wide: bool  # whether integers span the whole range of their type
    is_ours: bool  # multiring's own call; torch.distributed itself refuses conjugated views
    notes: list[str] = field(default_factory=list)
    guards: list[tuple[str, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def given(self, rank: int, number: int, shape: Shape, *, overwritten: bool = False) -> Tensor:
        """Return tensor `number` of a rank, in a random layout."""
        random = np.random.default_rng((self.entropy, rank, number))
        values = drawn_values(random, shape, self.kind, is_wide=self.is_wide)
        known = [
            name
            for name, (_, fits) in LAYOUTS.items()
            if fits(shape, self.kind) and not (overwritten and name in READ_ONLY) and (self.is_ours or name != "conj")
        ]
        name = "plain" if random.random() < 0.2 else known[int(random.integers(len(known)))]
        found = LAYOUTS[name][0](values)
        if rank == self.rank:
            self.notes.append(f"{name} {tuple(shape)}")
            if overwritten and name in {"strided", "sliced"}:
                self._guard(name, found)
        return found

    def own(self, number: int, shape: Shape, *, overwritten: bool = False) -> Tensor:
        """Return this rank's tensor `number`."""
        return self.given(self.rank, number, shape, overwritten=overwritten)

    def every(self, number: int, shape: Shape, *, overwritten: bool = False) -> list[Tensor]:
        """Return the elements of tensor `number` of each rank."""
        return [plain(self.given(each, number, shape, overwritten=overwritten)) for each in self.ranks]

    def place(self, number: int, shape: Shape) -> Tensor:
        """Return a tensor that receives a result on this rank; it holds other values."""
        return self.own(1000 + number, shape, overwritten=True)

    @property
    def here(self) -> int:
        """This rank's number in the group."""
        return list(self.ranks).index(self.rank)

    def spoilt(self) -> list[str]:
        """Return the layouts of tensors whose surrounding memory was overwritten."""
        return [name for name, place, beside, before in self.guards if not torch.equal(place[beside], before)]

    def _guard(self, name: str, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        memory = whole.view(torch.uint8).view(-1, tensor.element_size())
        beside = torch.ones(len(whole), dtype=torch.bool)
        taken = torch.arange(len(whole)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        beside[taken.reshape(-1)] = False
        self.guards.append((name, memory, beside, memory[beside].clone()))


def drawn_values(random: Random, shape: Shape, kind: torch.dtype, *, is_wide: bool) -> Tensor:
    """Return random values: whole numbers, small enough that sums do not round.

    With `is_wide`, integers span the whole range of their type.
    """
    if kind is torch.bool:
        return torch.from_numpy(np.asarray(random.integers(2, size=shape), bool))
    if kind in INTEGERS:
        name = str(kind).removeprefix("torch.")
        limits = np.iinfo(name)
        least, most = (limits.min, limits.max) if is_wide else (max(-4, limits.min), 4)
        return torch.from_numpy(np.asarray(random.integers(least, most, size=shape, dtype=name, endpoint=True)))
    values = torch.from_numpy(np.asarray(random.integers(-4, 5, size=shape), np.float64))
    if kind in COMPLEX:
        values = torch.complex(values, torch.from_numpy(np.asarray(random.integers(-4, 5, size=shape), np.float64)))
    return values.to(kind)


def drawn_shape(random: Random, *, least: int = 0) -> Shape:
    """Return a random shape with at least `least` dimensions, some of length zero."""
    if random.random() < 0.05:
        return (30_000,) if least < 2 else (300, 100)  # large enough that the transfer uses shared memory
    dims = int(random.integers(least, 5))
    lengths = [int(each) for each in random.integers(1, 4, dims)]
    if dims and random.random() < 0.1:
        lengths[int(random.integers(dims))] = 0
    return tuple(lengths)

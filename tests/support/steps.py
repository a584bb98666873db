"""Steps of random programs: operations, the data of every rank, and NumPy's results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.cases import DTYPES, FLOATS, assert_same, check_reduced, exact, operand

import multiring
from multiring._runtime.arrays import numpy_dtype
from multiring._schedule import OPS

Array = NDArray[Any]
Dice = np.random.Generator

MOST_AXES = 3  # most axes over which a sum may be rounded
LIMITS = (1 << 14, 1 << 16, 1 << 17, 1 << 20)  # bytes of a slot, a note, a staging slot, and the largest array
WIRES = ("fp16", "bf16", "int8")
BLOCK = 256  # elements that share an int8 scale
_FILLING = 0xA5


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a program. `seed` determines its data and its other random choices."""

    number: int
    kind: str
    team: int
    dtype: str
    op: str
    shape: tuple[int, ...]
    seed: int
    is_small_whole: bool  # floats are small whole numbers; their sums are exact in any order
    wire: str | None = None
    label: str = ""

    def dice(self) -> Dice:
        """Return a generator for the choices that all ranks must make alike."""
        return np.random.default_rng([self.seed, 1])

    def values(self, rank: int, shape: tuple[int, ...]) -> Array:
        """Return the operand of group rank `rank`."""
        if self.dtype not in FLOATS or not self.is_small_whole:
            return operand(self.dtype, self.op, shape, (self.seed, rank))
        dice = np.random.default_rng([self.seed, 2, rank])
        whole: Array = dice.choice([0.5, 1, 2], shape) if self.op == "product" else dice.integers(-8, 9, shape)
        return whole.astype(numpy_dtype(self.dtype))

    def check(self, result: Array, operands: list[Array], what: object) -> None:
        """Compare a reduction with NumPy's result."""
        if self.dtype in FLOATS and self.is_small_whole and self.op in ("sum", "product"):
            wide = np.stack([each.astype(np.float64) for each in operands])
            total = wide.sum(0) if self.op == "sum" else wide.prod(0)
            assert_same(result, total.astype(result.dtype), what)
        elif self.dtype in FLOATS:
            check_reduced(result, operands, self.op, MOST_AXES, what)
        else:
            assert_same(result, exact(operands, self.op), what)


def draw(dice: Dice, number: int, teams: int, kinds: dict[str, int]) -> Step:
    """Return the next operation of a program."""
    weights = np.array(list(kinds.values()), float)
    kind = str(dice.choice(list(kinds), p=weights / weights.sum()))
    dtype, op = str(dice.choice(DTYPES)), str(dice.choice(OPS))
    if (dtype, op) == ("bool", "average"):
        op = "sum"
    wire = None
    if kind == "all_reduce" and dice.random() < 0.15:
        dtype, op, wire = "float32", str(dice.choice(["sum", "average"])), str(dice.choice(WIRES))
    return Step(
        number=number,
        kind=kind,
        team=int(dice.integers(teams)),
        dtype=dtype,
        op=op,
        shape=_shape(dice, numpy_dtype(dtype).itemsize),
        seed=int(dice.integers(1 << 30)),
        is_small_whole=bool(dice.random() < 0.5),
        wire=wire,
        label=f"step {number}" if dice.random() < 0.1 else "",
    )


def _shape(dice: Dice, itemsize: int) -> tuple[int, ...]:
    """Return a shape of 0 bytes to 1 MiB.

    Small and large shapes are about equally likely, and sizes around the engines' limits are frequent.
    """
    if dice.random() < 0.3:
        count = int(dice.choice([0, 1, *(limit // itemsize for limit in LIMITS)])) + int(dice.integers(-1, 2))
    else:
        count = int(2 ** dice.uniform(0, 20)) // itemsize
    count = min(max(count, 0), (1 << 20) // itemsize)
    shape = [count]
    for _ in range(int(dice.integers(0, 4))):
        width = int(dice.integers(1, 6))
        shape = [shape[0] // width, width, *shape[1:]]
    return tuple(shape)


class Box:
    """An array that supports only DLPack."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Memory:
    """An array in memory with guard bytes on both sides, which no operation may write."""

    def __init__(self, group: multiring.Group, values: Array, dice: Dice, axes: tuple[int, ...] | None = None) -> None:
        """Store `values` at a random place. `axes` is the order of the dimensions in memory, slowest first."""
        kind, size = values.dtype, values.nbytes
        item = kind.itemsize
        before = int(dice.choice([0, 64, item * dice.integers(1, 80), dice.integers(1, 200)], p=[0.4, 0.2, 0.3, 0.1]))
        total = before + size + int(dice.integers(0, 100))
        self._block = group.allocate(total, "uint8") if dice.random() < 0.5 else np.empty(total, np.uint8)
        self._block[:] = _FILLING
        self._inside = slice(before, before + size)
        self.flat: Array = self._block[self._inside].view(kind)  # in memory order
        axes = tuple(range(values.ndim)) if axes is None else axes
        self.array: Array = self.flat.reshape([values.shape[axis] for axis in axes]).transpose(np.argsort(axes))
        self.array[...] = values
        self.shown: Any = self.array
        plain = kind.name not in ("bfloat16", "bool") and size > 0 and self.array.flags.aligned
        way = dice.random()
        if plain and way < 0.1:
            self.shown = Box(self.array)
        elif plain and way < 0.2 and self.array.flags.c_contiguous:
            self.shown = memoryview(self.array)

    def check_around(self, what: object) -> None:
        """Raise AssertionError if an operation wrote a guard byte."""
        outside = np.concatenate([self._block[: self._inside.start], self._block[self._inside.stop :]])
        assert (outside == _FILLING).all(), f"{what}: {(outside != _FILLING).sum()} bytes beside the array were written"


def check_coded(result: Array, operands: list[Array], step: Step) -> None:
    """Compare a coded sum or average with NumPy's, within the wire's error bound of docs/algorithms.md.

    On each axis that crosses hosts, a contribution is encoded once on its way in, and the sum once on its way out.
    Each encoding loses at most the sum of the losses of all contributions.
    """
    wide = np.stack([each.astype(np.float64) for each in operands])
    lost = sum(_lost(np.abs(each), step.wire) for each in wide)
    scale = len(operands) if step.op == "average" else 1
    bound = (2 * (MOST_AXES - 1) * 1.1 * lost + 2**-20 * np.abs(wide).sum(0)) / scale + 2**-24
    far = np.abs(result - wide.sum(0) / scale) > bound
    assert not far.any(), (
        f"{step}: {far.sum()} of {far.size} exceed the error bound, the first at {np.flatnonzero(far)[0]}"
    )


def _lost(magnitudes: Array, wire: str | None) -> Array:
    if wire != "int8":
        return magnitudes * (2**-11 if wire == "fp16" else 2**-8)
    padded = np.zeros(-(-len(magnitudes) // BLOCK) * BLOCK)
    padded[: len(magnitudes)] = magnitudes
    largest = padded.reshape(-1, BLOCK).max(axis=1, initial=0)
    return np.repeat(largest, BLOCK)[: len(magnitudes)] * 0.004

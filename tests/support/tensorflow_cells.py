"""The table of cells of multiring.tensorflow: operation, type, mode and outcome.

The table resembles that of `cells.py` for torch. A cell names an operation, a type, a mode (eager or graph) and an
outcome: correct values, correct gradients, or an error. NumPy computes the expected values in 64 bits.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.support.ranks import Here

import multiring
import multiring.tensorflow as mt
from multiring.errors import ArgumentError

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
TYPES = (*FLOATS, *SIGNED, *UNSIGNED, "bool", *COMPLEX)
REDUCING, SCATTERING = ("allreduce", "grouped_allreduce"), ("reducescatter", "grouped_reducescatter")
GATHERING = ("allgather", "grouped_allgather")
EVERYTHING = (*REDUCING, *SCATTERING, *GATHERING, "broadcast", "alltoall")
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product", "Adasum")
MODES = ("eager", "graph")
BOUNDS = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-12, "complex128": 1e-12}
ErrorCase = tuple[type[Exception], str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table.

    `outcome` is "value", "scaled value", "gradient", or the name of the expected error.
    """

    operation: str
    reduction: str  # "" if the cell names no reduction
    dtype: str
    mode: str
    outcome: str

    def __str__(self) -> str:
        parts = (self.operation, self.reduction, self.dtype, self.mode, "->", self.outcome)
        return " ".join(part for part in parts if part)


def cells_of(ranks: int) -> list[Cell]:
    """Return all cells that make sense for `ranks` ranks.

    A single rank cannot disagree with others, so it has no mismatch cells.
    """
    kinds = [*_value_cells(), *_gradient_cells(), *_own_error_cells(), *(_shared_error_cells() if ranks > 1 else ())]
    return [
        Cell(operation, reduction, dtype, mode, outcome)
        for operation, reduction, dtype, outcome in kinds
        for mode in MODES
    ]


Kind = tuple[str, str, str, str]


def _value_cells() -> Iterator[Kind]:
    for (operation, reduction), dtype in product(
        [*product(REDUCING, REDUCTIONS), *product(SCATTERING, ("Average", "Sum"))], TYPES
    ):
        known = has_meaning(reduction, dtype)
        yield operation, reduction, dtype, "value" if known else "no meaning"
        if known and reduction in ("Average", "Sum") and dtype != "bool":
            yield operation, reduction, dtype, "scaled value"
    for operation, dtype in product((*GATHERING, "broadcast", "alltoall"), TYPES):
        yield operation, "", dtype, "value"


def _gradient_cells() -> Iterator[Kind]:
    for operation, reduction, dtype in product((*REDUCING, *SCATTERING), ("Average", "Sum"), FLOATS):
        yield operation, reduction, dtype, "gradient"
    for operation, dtype in product((*GATHERING, "broadcast", "alltoall"), FLOATS):
        yield operation, "", dtype, "gradient"


def _own_error_cells() -> Iterator[Kind]:
    for operation in EVERYTHING:
        yield operation, "", "float32", "unknown process set"
    for operation in REDUCING:
        yield operation, "", "float32", "unknown op"
    for operation in (*GATHERING, *SCATTERING, "alltoall"):
        yield operation, "", "float32", "no dimension"
    yield "broadcast", "", "float32", "no such root"
    yield "alltoall", "", "float32", "splits beyond the rows"


def _shared_error_cells() -> Iterator[Kind]:
    """Yield cells in which the ranks' calls differ.

    No cell has different operations: TensorFlow gives each operation its own name, so the ranks would
    wait for each other.
    """
    for operation in EVERYTHING:
        for outcome in ("not in the set", "Mismatched .* tensor shapes"):
            yield operation, "", "float32", outcome
        for dtype in ("float64", "int32", "bfloat16"):
            yield operation, "", dtype, "Mismatched data types"
    for operation in (*REDUCING, *SCATTERING):
        yield operation, "", "float32", "Mismatched reduction operation"
        yield operation, "", "float32", "Mismatched prescale and/or postscale factors"
    yield "broadcast", "", "float32", "Mismatched BROADCAST root ranks"


def has_meaning(reduction: str, dtype: str) -> bool:
    """Return whether `reduction` is defined for tensors of type `dtype`."""
    if reduction == "Adasum":
        return dtype in FLOATS
    if dtype == "bool":
        return reduction != "Average"
    return reduction in ("Average", "Sum") or dtype not in COMPLEX


def run_cells(here: Here, chosen: list[Cell]) -> list[str]:
    """Run the cells; return a description of each failure."""
    others = _begin(here)
    wrong = []
    for cell in chosen:
        failed = np.zeros(1, np.int32)
        try:
            _Run(cell, here.rank, here.size, others).check()
        except Exception as error:  # noqa: BLE001 -- reported with the cell's name
            wrong.append(f"{cell}: {type(error).__name__}: {error}")
            failed[0] = 1
        # A failed rank may be out of step with the others, so all ranks restart multiring.
        multiring.world().all_reduce(failed, "max")
        if failed[0]:
            mt.shutdown()
            others = _begin(here)
    mt.shutdown()
    return wrong


def _begin(here: Here) -> Any:
    mt.init(process_sets="dynamic")
    return mt.add_process_set([0]) if here.size > 1 else mt.global_process_set


def combined(cell: Cell, everyones: list[Any], prescale: float = 1.0, postscale: float = 1.0) -> Any:
    """Return the expected result of the ranks' arrays, computed in 64 bits."""
    if cell.dtype == "bool":
        stacked = np.stack(everyones)
        return stacked.all(0) if cell.reduction in ("Min", "Product") else stacked.any(0)
    is_whole = cell.dtype.lstrip("u").startswith("int")
    wide = np.int64 if is_whole else np.complex128 if cell.dtype in COMPLEX else np.float64
    stacked = np.stack([_scaled(np.asarray(each).astype(wide), prescale) for each in everyones])
    if cell.reduction in ("Sum", ""):
        return _scaled(stacked.sum(0), postscale)
    if cell.reduction == "Average":
        total = stacked.sum(0)
        return np.trunc(total * postscale / len(everyones)) if is_whole else total * postscale / len(everyones)
    if cell.reduction == "Adasum":
        return stacked[0]
    combine: Any = {"Min": np.min, "Max": np.max, "Product": np.prod}[cell.reduction]
    return combine(stacked, axis=0)


def _scaled(values: Any, factor: float) -> Any:
    if factor == 1.0:
        return values
    return np.trunc(values * factor).astype(np.int64) if values.dtype == np.int64 else values * factor


def same(found: Any, wanted: Any, dtype: str, what: str) -> None:
    """Fail unless `found` has the type `dtype` and equals `wanted` within its bound."""
    assert found.dtype.name == dtype, f"{what}: {found.dtype.name} instead of {dtype}"
    wide = np.complex128 if dtype in COMPLEX else np.float64
    value, wanted = found.numpy().astype(wide), np.asarray(wanted).astype(wide)
    assert value.shape == wanted.shape, f"{what}: shape {value.shape} instead of {wanted.shape}"
    limit = BOUNDS.get(dtype, 0.0) * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    assert np.abs(value - wanted).max(initial=0.0) <= limit, f"{what}: {value} instead of {wanted}"


class _Run:
    """The run of one cell on one rank."""

    def __init__(self, cell: Cell, rank: int, ranks: int, others: Any) -> None:
        self.cell, self.rank, self.ranks, self.others = cell, rank, ranks, others
        self.is_grouped = cell.operation.startswith("grouped_")

    def check(self) -> None:
        {"value": self.check_value, "scaled value": self.check_value, "gradient": self.check_gradient}.get(
            self.cell.outcome, self.check_error
        )()

    def call(self, tensors: list[Any], **options: Any) -> list[Any]:
        """Return the operation's result for each tensor.

        A result of alltoall is the pair of the rows and the row counts by sender.
        """
        function: Any = getattr(mt, self.cell.operation)
        if self.cell.reduction:
            options.setdefault("op", getattr(mt, self.cell.reduction))
        if self.cell.operation == "broadcast":
            options.setdefault("root_rank", 0)

        def run(*given: Any) -> Any:
            if self.is_grouped:
                return function(list(given), **options)
            return [function(each, **options) for each in given]

        found: list[Any] = (tf.function(run) if self.cell.mode == "graph" else run)(*tensors)
        return found

    def arrays_of(self, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
        """Return rank `rank`'s arrays, one of each shape.

        The numbers are small enough that every type can represent every result.
        """
        dice = np.random.default_rng(100 + rank)
        lowest = -3 if self.cell.dtype not in UNSIGNED and self.cell.reduction != "Product" else 1
        found = [dice.integers(lowest, 4, shape) for shape in shapes]
        if self.cell.reduction == "Adasum":
            found = [np.ones_like(each) for each in found]
        if self.cell.dtype == "bool":
            return [np.asarray(each > 1) for each in found]
        return (
            [each + 1j * each[::-1] if each.ndim else each + 1j * each for each in found]
            if self.cell.dtype in COMPLEX
            else found
        )

    def tensor(self, array: Any) -> Any:
        return tf.cast(tf.constant(array), self.cell.dtype)

    # ---- values ----

    def check_value(self) -> None:
        operation, ranks, own = self.cell.operation, self.ranks, self.rank
        if operation in GATHERING:
            given = [self.arrays_of(rank, ((rank + 1, 2), (2, 3))) for rank in range(ranks)]
            found = self.call([self.tensor(each) for each in given[own]])
            wanted = [np.concatenate([each[part] for each in given]) for part in range(2)]
        elif operation == "broadcast":
            shapes: tuple[tuple[int, ...], ...] = ((), (0, 3), (7,), (2, 3, 4))
            found = self.call([self.tensor(each) for each in self.arrays_of(own, shapes)], root_rank=ranks - 1)
            wanted = self.arrays_of(ranks - 1, shapes)
        elif operation == "alltoall":
            counts = list(range(1, ranks + 1))
            given = [self.arrays_of(rank, ((sum(counts), 2),)) for rank in range(ranks)]
            ((rows, splits),) = self.call([self.tensor(given[own][0])], splits=counts)
            assert splits.numpy().tolist() == [own + 1] * ranks
            first = sum(counts[:own])
            found, wanted = [rows], [np.concatenate([each[0][first : first + own + 1] for each in given])]
        else:
            is_scattered = operation in SCATTERING
            shapes = ((2 * ranks + 1, 2), (ranks, 3)) if is_scattered else ((), (0, 3), (7,), (300, 5))
            factors = (2.0, 0.5) if self.cell.outcome == "scaled value" else (1.0, 1.0)
            given = [self.arrays_of(rank, shapes) for rank in range(ranks)]
            options = {"prescale_factor": factors[0], "postscale_factor": factors[1]} if factors[0] != 1.0 else {}
            found = self.call([self.tensor(each) for each in given[own]], **options)
            wanted = [combined(self.cell, [each[part] for each in given], *factors) for part in range(len(shapes))]
            wanted = [np.array_split(each, ranks)[own] for each in wanted] if is_scattered else wanted
        for each, due in zip(found, wanted, strict=True):
            same(each, due, self.cell.dtype, "value")

    # ---- gradients ----

    def check_gradient(self) -> None:
        operation, ranks = self.cell.operation, self.ranks
        options: dict[str, Any] = {"root_rank": ranks - 1} if operation == "broadcast" else {}
        if operation == "alltoall":
            options["splits"] = [2] + [1] * (ranks - 1)
        if self.cell.reduction:
            options |= {"prescale_factor": 0.5, "postscale_factor": 4.0}
        own = [self.tensor(each) for each in self.arrays_of(self.rank, ((4 + ranks, 2), (4 + ranks,)))]
        with tf.GradientTape() as tape:
            tape.watch(own)
            found = self.call(own, **options)
            found = [each[0] for each in found] if operation == "alltoall" else found
            # Each rank multiplies its loss by its rank plus 1.
            loss = tf.add_n([tf.reduce_sum(each) * (1 + self.rank) for each in found])
        weights = np.arange(1.0, ranks + 1)
        for given, gradient in zip(own, tape.gradient(loss, own), strict=True):
            same(gradient, self.wanted_gradient(given.shape.as_list(), weights), self.cell.dtype, "gradient")

    def wanted_gradient(self, shape: list[int], weights: Any) -> Any:
        operation, ranks = self.cell.operation, self.ranks
        ones = np.ones(shape)
        factor = 2.0 * (ranks if self.cell.reduction == "Sum" else 1)
        if operation in REDUCING:
            return ones * weights.mean() * factor
        if operation in SCATTERING:
            parts = zip(np.array_split(ones, ranks), weights, strict=True)
            return np.concatenate([part * weight for part, weight in parts]) * factor
        if operation in GATHERING:
            return ones * weights.mean()
        if operation == "broadcast":
            return ones * weights.mean() * (self.rank == ranks - 1)
        found = np.zeros(shape)
        found[: ranks + 1] = np.concatenate([weights[:1], weights]).reshape(-1, *[1] * (len(shape) - 1))
        return found

    # ---- errors ----

    def check_error(self) -> None:
        for kind, text, attempt in self.error_cases():
            with pytest.raises(Exception, match=text) as raised:
                attempt()
            found = mt.error_of(raised.value) or raised.value
            assert isinstance(found, kind), f"{type(found).__name__} instead of {kind.__name__}: {found}"

    def error_cases(self) -> list[ErrorCase]:
        """Return the cell's failing calls: an error type, a pattern and the call."""
        outcome, ranks = self.cell.outcome, self.ranks
        odd = self.rank == ranks - 1
        plain = tf.ones((2 * ranks, 2))
        shaped = tf.ones((2 * ranks, 3 if odd else 2))
        typed = tf.cast(plain, self.cell.dtype)
        unknown, internal = mt.ProcessSet([0]), mt.HorovodInternalError
        options: dict[str, tuple[type[Exception], str, Any, dict[str, Any]]] = {
            "no meaning": (ArgumentError, self.cell.dtype, typed, {}),
            "unknown process set": (ArgumentError, "is not known", plain, {"process_set": unknown}),
            "unknown op": (ArgumentError, "op=9: want one of", plain, {"op": 9}),
            "no dimension": (Exception, "no dimensions|rank-zero|dimension", tf.ones(()), {}),
            "no such root": (ArgumentError, "want one of", plain, {"root_rank": 99}),
            "splits beyond the rows": (ArgumentError, "splits", plain, {"splits": [3] * ranks}),
            "Mismatched data types": (internal, f"{outcome}.*{self.cell.dtype}", typed if odd else plain, {}),
            "Mismatched .* tensor shapes": (internal, outcome, shaped, {}),
            "Mismatched reduction operation": (internal, outcome, plain, {"op": mt.Sum if odd else mt.Average}),
            "Mismatched BROADCAST root ranks": (internal, outcome, plain, {"root_rank": int(odd)}),
        }
        if outcome in options:
            kind, text, tensor, more = options[outcome]
            return [(kind, text, lambda: self.call([tensor], **more))]
        if outcome == "not in the set":
            return self.foreign_cases()
        return [
            (
                internal,
                "Mismatched prescale and/or postscale factors",
                partial(self.call, [plain], **{key: 2.0 if odd else 1.0}),
            )
            for key in ("prescale_factor", "postscale_factor")
        ]

    def foreign_cases(self) -> list[ErrorCase]:
        """Return the error that a rank gets from a process set without this rank.

        Rank 0 is the set's only member; its call succeeds.
        """
        if self.rank:
            return [(ArgumentError, "is not in", lambda: self.call([tf.ones((2, 2))], process_set=self.others))]
        self.call([tf.ones((2, 2))], process_set=self.others)
        return []


def sample(ranks: int, count: int, seed: int) -> list[Cell]:
    """Return a random sample of `count` cells.

    The sample has at least one cell for each outcome of each operation, so it can be larger than `count`.
    """
    everything = cells_of(ranks)
    random.Random(seed).shuffle(everything)  # noqa: S311 -- chooses tests
    first: dict[tuple[str, str], Cell] = {}
    for cell in everything:
        first.setdefault((cell.operation.removeprefix("grouped_"), cell.outcome), cell)
    chosen = list(first.values())
    rest = [cell for cell in everything if cell not in set(chosen)]
    return [*chosen, *rest[: max(0, count - len(chosen))]]

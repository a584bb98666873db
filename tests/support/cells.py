"""The table of cells: operations of multiring.torch with types and outcomes.

A cell names an operation, a type and an outcome: correct values, correct gradients, or an error. `cells_of` returns all
cells that make sense for a number of ranks; `run_cells` runs cells on the ranks of one job.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain import backward, enter
from tests.support.ranks import Here
from torch import Tensor

import multiring
import multiring.torch as mt
from multiring.errors import ArgumentError
from multiring.torch.interop import dtype_name

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
SUMMED = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
MOVED = (*SUMMED, "float8_e4m3fn")
DIFFERENTIABLE = ("float16", "bfloat16", "float32", "float64")

ALLREDUCE = ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_")
GROUPED_ALLREDUCE = tuple(f"grouped_{each}" for each in ALLREDUCE)
REDUCESCATTER = ("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async")
ALLGATHER = ("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async")
BROADCAST = ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_")
ALLTOALL = ("alltoall", "alltoall_async")
SPARSE = "sparse_allreduce_async"
REDUCING = (*ALLREDUCE, *GROUPED_ALLREDUCE)
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product", "Adasum")

BOUNDS = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-12, "complex128": 1e-12}
ErrorCase = tuple[type[Exception], str, Callable[[], object]]
SHAPES = ((), (0, 3), (7,), (2, 3, 4), (5000,))
ROWS = ((3,), (2, 3), (0, 2), (4, 0), (300, 5))


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table.

    `outcome` is "value", "scaled value", "gradient", or the name of the expected error.
    """

    operation: str
    reduction: str  # "" if the cell names no reduction
    dtype: str
    outcome: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.operation, self.reduction, self.dtype, "->", self.outcome) if part)


def cells_of(ranks: int) -> list[Cell]:
    """Return all cells that make sense for `ranks` ranks.

    A single rank cannot disagree with others, so it has no mismatch cells.
    """
    return [*_value_cells(), *_gradient_cells(), *_own_error_cells(), *(_shared_error_cells() if ranks > 1 else ())]


def _value_cells() -> Iterator[Cell]:
    reducing = [*product(REDUCING, REDUCTIONS), *product(REDUCESCATTER, ("Average", "Sum"))]
    for (operation, reduction), dtype in product(reducing, SUMMED):
        known = has_meaning(reduction, dtype)
        yield Cell(operation, reduction, dtype, "value" if known else "ArgumentError")
        if known and reduction in ("Average", "Sum") and dtype != "bool":
            yield Cell(operation, reduction, dtype, "scaled value")
    for operation in (*ALLGATHER, *BROADCAST, *ALLTOALL):
        for dtype in MOVED:
            yield Cell(operation, "", dtype, "value")
    for reduction in ("Average", "Sum"):
        for dtype in (*FLOATS, "int64", *COMPLEX):
            yield Cell(SPARSE, reduction, dtype, "value")
            yield Cell("allreduce of sparse", reduction, dtype, "value")


def _gradient_cells() -> Iterator[Cell]:
    for operation in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"):
        for reduction in ("Average", "Sum"):
            for dtype in DIFFERENTIABLE:
                yield Cell(operation, reduction, dtype, "gradient")
    for operation in ("allgather", "grouped_allgather", "broadcast", "alltoall"):
        for dtype in DIFFERENTIABLE:
            yield Cell(operation, "", dtype, "gradient")


def _own_error_cells() -> Iterator[Cell]:
    """Yield cells in which every rank passes the same wrong argument."""
    everything = (*REDUCING, *REDUCESCATTER, *ALLGATHER, *BROADCAST, *ALLTOALL)
    for operation in everything:
        yield Cell(operation, "", "float32", "unknown process set")
        if operation.endswith(("async", "async_")):
            yield Cell(operation, "", "float32", "name in use")
    for operation in REDUCING:
        yield Cell(operation, "", "float32", "op and average")
        yield Cell(operation, "", "float32", "unknown op")
        yield Cell(operation, "", "float8_e4m3fn", "ArgumentError")
    for operation in REDUCESCATTER:
        yield Cell(operation, "Max", "float32", "refused")
    for operation in (*ALLGATHER, *ALLTOALL, *REDUCESCATTER):
        yield Cell(operation, "", "float32", "no dimension")
    for operation in BROADCAST:
        yield Cell(operation, "", "float32", "no such root")
    for operation in ALLTOALL:
        for outcome in ("splits of another type", "too few splits", "splits beyond the rows"):
            yield Cell(operation, "", "float32", outcome)


def _shared_error_cells() -> Iterator[Cell]:
    """Yield cells in which the ranks' calls differ; they need at least two ranks."""
    everything = (*REDUCING, *REDUCESCATTER, *ALLGATHER, *BROADCAST, *ALLTOALL)
    for operation in everything:
        yield Cell(operation, "", "float32", "Mismatched operations")
        yield Cell(operation, "", "float32", "not in the set")
        for dtype in ("float64", "int32", "bfloat16"):
            yield Cell(operation, "", dtype, "Mismatched data types")
        yield Cell(operation, "", "float32", "Mismatched .* tensor shapes")
    for operation in (*REDUCING, *REDUCESCATTER):
        yield Cell(operation, "", "float32", "Mismatched reduction operation")
        yield Cell(operation, "", "float32", "Mismatched prescale and/or postscale factors")
    for operation in (*ALLGATHER, *ALLTOALL, *REDUCESCATTER):
        yield Cell(operation, "", "float32", "no dimension on one rank")
    for operation in BROADCAST:
        yield Cell(operation, "", "float32", "Mismatched BROADCAST root ranks")


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


def _begin(here: Here) -> mt.ProcessSet:
    enter(process_sets="dynamic")
    return mt.add_process_set([0]) if here.size > 1 else mt.global_process_set


def tensors_of(cell: Cell, rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Return rank `rank`'s tensors, one of each shape.

    The numbers are small enough that every type can represent every result.
    """
    dtype = getattr(torch, cell.dtype)
    generator = torch.Generator().manual_seed(100 + rank)
    lowest = -3 if dtype.is_signed and cell.reduction != "Product" else 1
    found = []
    for shape in shapes:
        values = torch.randint(lowest, 4, shape, generator=generator)
        if cell.reduction == "Adasum":
            values = torch.ones(shape, dtype=torch.int64)
        if dtype.is_complex:
            found.append(
                torch.complex(values.double(), values.double().flip(0) if shape else values.double()).to(dtype)
            )
        else:
            found.append((values > 1).to(dtype) if dtype is torch.bool else values.float().to(dtype))
    return found


def combined(cell: Cell, everyones: list[Tensor], prescale: float = 1.0, postscale: float = 1.0) -> Tensor:
    """Return the expected result of the ranks' tensors, computed in 64 bits."""
    dtype, ranks = everyones[0].dtype, len(everyones)
    if dtype is torch.bool:
        stacked = torch.stack(everyones)
        return stacked.all(0) if cell.reduction in ("Min", "Product") else stacked.any(0)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    wide = torch.int64 if whole else torch.complex128 if dtype.is_complex else torch.float64
    scaled = [_scaled(each.to(wide), prescale) for each in everyones]
    stacked = torch.stack(scaled)
    if cell.reduction in ("Sum", ""):
        return _scaled(stacked.sum(0), postscale).to(dtype)
    if cell.reduction == "Average":
        if whole and postscale == 1.0:
            return torch.div(stacked.sum(0), ranks, rounding_mode="trunc").to(dtype)
        return _scaled(stacked.sum(0), postscale / ranks).to(dtype)
    if cell.reduction == "Adasum":
        return everyones[0]
    return {"Min": stacked.amin(0), "Max": stacked.amax(0), "Product": stacked.prod(0)}[cell.reduction].to(dtype)


def _scaled(values: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return values
    return (values.double() * factor).to(torch.int64) if values.dtype == torch.int64 else values * factor


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Fail unless two tensors have the same dtype, shape and values.

    Values of floating-point types may differ by the type's bound in `BOUNDS`.
    """
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype} instead of {wanted.dtype}"
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    bound = BOUNDS.get(dtype_name(wanted.dtype), 0.0)
    if bound:
        difference = (found.to(torch.complex128) - wanted.to(torch.complex128)).abs()
        limit = bound * max(1.0, float(wanted.to(torch.complex128).abs().max())) if wanted.numel() else 0.0
        assert not wanted.numel() or float(difference.max()) <= limit, f"{what}: {found} instead of {wanted}"
    else:
        view = torch.uint8 if wanted.dtype.itemsize == 1 else wanted.dtype
        assert torch.equal(found.contiguous().view(view), wanted.contiguous().view(view)), (
            f"{what}: {found}, not {wanted}"
        )


class _Run:
    """The run of one cell on one rank."""

    def __init__(self, cell: Cell, rank: int, ranks: int, others: mt.ProcessSet) -> None:
        self.cell, self.rank, self.ranks, self.others = cell, rank, ranks, others
        self.is_grouped = cell.operation.startswith("grouped")
        self.in_place = cell.operation.endswith("_")

    def check(self) -> None:
        """Fail unless the operation has the cell's outcome."""
        outcomes: dict[str, Callable[[], None]] = {
            "value": self.check_value,
            "scaled value": self.check_scaled,
            "gradient": self.check_gradient,
        }
        outcome = outcomes.get(self.cell.outcome)
        if outcome is not None:
            outcome()
            return
        self.check_error()
        # An error must leave multiring usable: the next operation works.
        assert mt.allreduce(torch.ones(2), op=mt.Sum).tolist() == [float(self.ranks)] * 2

    def call(self, tensors: list[Tensor], **options: Any) -> list[Any]:
        """Call the operation, wait for it, and return one result for each tensor."""
        operation = getattr(mt, self.cell.operation)
        if self.cell.reduction:
            options.setdefault("op", getattr(mt, self.cell.reduction))
        found = operation(tensors if self.is_grouped else tensors[0], **options)
        if "async" in self.cell.operation:
            assert isinstance(found, int)
            number, found = found, mt.synchronize(found)
            assert mt.synchronize(number) is None
        return list(found) if self.is_grouped else [found]

    def everyones(self, shapes: tuple[tuple[int, ...], ...]) -> list[list[Tensor]]:
        return [tensors_of(self.cell, rank, shapes) for rank in range(self.ranks)]

    # ---- values ----

    def check_value(self) -> None:
        operation = self.cell.operation
        if operation in (SPARSE, "allreduce of sparse"):
            self.check_sparse()
        elif operation in REDUCING:
            self.check_reduced(1.0, 1.0)
        elif operation in REDUCESCATTER:
            self.check_scattered(1.0, 1.0)
        elif operation in ALLGATHER:
            self.check_gathered()
        elif operation in BROADCAST:
            self.check_broadcast()
        else:
            self.check_exchanged()

    def check_scaled(self) -> None:
        if self.cell.operation in REDUCING:
            self.check_reduced(0.5, 3.0)
        else:
            self.check_scattered(0.5, 3.0)

    def batches(self, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], ...]]:
        """Return the shapes of the tensors of each call."""
        return [shapes] if self.is_grouped else [(shape,) for shape in shapes]

    def check_reduced(self, prescale: float, postscale: float) -> None:
        options: dict[str, Any] = {}
        if (prescale, postscale) != (1.0, 1.0):
            options = {"prescale_factor": prescale, "postscale_factor": postscale}
        for shapes in self.batches(SHAPES):
            everyones = self.everyones(shapes)
            own = everyones[self.rank]
            # Another memory layout must not change the result.
            own = [each.mT.contiguous().mT if each.dim() == 3 else each.clone() for each in own]
            before = [each.clone() for each in own]
            found = self.call(own, **options)
            for place, wanted in enumerate(zip(*everyones, strict=True)):
                same(found[place], combined(self.cell, list(wanted), prescale, postscale), f"{shapes[place]}")
                if self.in_place:
                    assert found[place] is own[place]
                else:
                    same(own[place], before[place], "input")

    def check_scattered(self, prescale: float, postscale: float) -> None:
        options: dict[str, Any] = {}
        if (prescale, postscale) != (1.0, 1.0):
            options = {"prescale_factor": prescale, "postscale_factor": postscale}
        for shapes in self.batches(ROWS):
            everyones = self.everyones(shapes)
            own = everyones[self.rank]
            before = [each.clone() for each in own]
            found = self.call(own, **options)
            for place, tensors in enumerate(zip(*everyones, strict=True)):
                whole = combined(self.cell, list(tensors), prescale, postscale)
                wanted = torch.tensor_split(whole, self.ranks)[self.rank]
                same(found[place], wanted, f"{shapes[place]}")
                same(own[place], before[place], "input")

    def check_gathered(self) -> None:
        for shapes in self.batches(ROWS):
            for more in (0, 1):  # equal, then unequal row counts
                everyones = [
                    tensors_of(self.cell, rank, tuple((shape[0] + more * rank, *shape[1:]) for shape in shapes))
                    for rank in range(self.ranks)
                ]
                found = self.call(everyones[self.rank])
                for place, wanted in enumerate(zip(*everyones, strict=True)):
                    same(found[place], torch.cat(wanted), f"{shapes[place]}")

    def check_broadcast(self) -> None:
        for shape in SHAPES:
            for root in range(self.ranks):
                everyones = self.everyones((shape,))
                own = [each.clone() for each in everyones[self.rank]]
                before = own[0].clone()
                found = self.call(own, root_rank=root)
                same(found[0], everyones[root][0], f"{shape} from {root}")
                if self.in_place:
                    assert found[0] is own[0]
                else:
                    same(own[0], before, "input")

    def check_exchanged(self) -> None:
        for behind in ((), (3,), (0,)):
            # Rank r sends r + 1 rows to every rank.
            everyones = self.shares(behind)
            tensor = torch.cat(everyones[self.rank])
            wanted = torch.cat([parts[self.rank] for parts in everyones])
            received = list(range(1, self.ranks + 1))
            for splits in (
                None,
                torch.tensor([self.rank + 1] * self.ranks, dtype=torch.int32),
                [self.rank + 1] * self.ranks,
            ):
                found = self.call([tensor], splits=splits)[0]
                if splits is not None or "async" in self.cell.operation:
                    found, found_splits = found
                    assert found_splits.dtype == torch.int32
                    assert found_splits.tolist() == received
                same(found, wanted, f"rows of {behind}")

    def shares(self, behind: tuple[int, ...]) -> list[list[Tensor]]:
        """Return the tensors that each sender has for each receiver."""
        return [
            list(torch.split(tensors_of(self.cell, rank, (((rank + 1) * self.ranks, *behind),))[0], rank + 1))
            for rank in range(self.ranks)
        ]

    def check_sparse(self) -> None:
        for count in (0, 1, 4):
            everyones = [self.sparse_of(rank, count) for rank in range(self.ranks)]
            own = everyones[self.rank]
            if self.cell.operation == SPARSE:
                found = mt.sparse_allreduce_async(own, "table", getattr(mt, self.cell.reduction))()
            else:
                found = mt.allreduce(own, op=getattr(mt, self.cell.reduction))
            assert found.layout == torch.sparse_coo
            same(found.to_dense(), combined(self.cell, [each.to_dense() for each in everyones]), f"{count} elements")

    def sparse_of(self, rank: int, count: int) -> Tensor:
        """Return a sparse 5-row matrix of `count + rank` entries; rows may repeat."""
        numbers = torch.arange(count + rank) * 2 % 5
        values = tensors_of(self.cell, rank, ((len(numbers), 2),))[0]
        return torch.sparse_coo_tensor(numbers[None], values, (5, 2), check_invariants=True)

    # ---- gradients ----

    def check_gradient(self) -> None:
        operation, ranks = self.cell.operation, self.ranks
        shapes = ((4 + ranks, 2), (3,)) if self.is_grouped else ((4 + ranks, 2),)
        own = [each.requires_grad_() for each in tensors_of(self.cell, self.rank, shapes)]
        options: dict[str, Any] = {"root_rank": ranks - 1} if operation == "broadcast" else {}
        if operation == "alltoall":
            options["splits"] = [2] + [1] * (ranks - 1)
        if self.cell.reduction:
            options |= {"prescale_factor": 0.5, "postscale_factor": 4.0}
        found = self.call(own, **options)
        if operation == "alltoall":
            found = [found[0][0]]
        # Each rank multiplies its loss by its rank plus 1.
        backward(torch.stack([(each * (1 + self.rank)).sum() for each in found]).sum())
        weights = torch.arange(1.0, ranks + 1)
        for tensor in own:
            wanted = self.wanted_gradient(tensor.detach(), weights)
            assert tensor.grad is not None
            same(tensor.grad, wanted.to(tensor.dtype), "gradient")

    def wanted_gradient(self, tensor: Tensor, weights: Tensor) -> Tensor:
        operation, ranks = self.cell.operation, self.ranks
        ones = torch.ones(tensor.shape)
        factor = ranks if self.cell.reduction == "Sum" else 1
        if operation.endswith("allreduce"):
            return ones * float(weights.mean()) * 2.0 * factor
        if operation.endswith("reducescatter"):
            parts = zip(torch.tensor_split(ones, ranks), weights, strict=True)
            return torch.cat([part * weight for part, weight in parts]) * 2.0 * factor
        if operation.endswith("allgather"):
            return ones * float(weights.mean())
        if operation == "broadcast":
            return ones * float(weights.mean()) * (self.rank == ranks - 1)
        found = torch.zeros(tensor.shape)
        found[: ranks + 1] = torch.cat([weights[:1], weights])[:, None]
        return found

    # ---- errors ----

    def check_error(self) -> None:
        for kind, text, attempt in self.error_cases():
            with pytest.raises(kind, match=text):
                attempt()

    def error_cases(self) -> list[ErrorCase]:
        """Return the cell's failing calls: an error type, a pattern and the call."""
        outcome = self.cell.outcome
        odd = self.rank == self.ranks - 1
        plain = torch.ones(2 * self.ranks, 2)
        shaped = torch.ones(2 * self.ranks, 3 if odd else 2)
        typed = plain.to(getattr(torch, self.cell.dtype)) if odd else plain
        scalar = torch.ones(()) if odd or outcome == "no dimension" else plain
        unknown = mt.ProcessSet([0])
        cases: dict[str, Callable[[], list[ErrorCase]]] = {
            "ArgumentError": lambda: [
                (ArgumentError, self.cell.dtype, lambda: self.call_with(typed_as(self.cell, plain)))
            ],
            "unknown process set": lambda: [
                (ArgumentError, "is not known", lambda: self.call_with(plain, process_set=unknown))
            ],
            "name in use": lambda: [(ArgumentError, "same name as another tensor that is currently", self.twice)],
            "op and average": lambda: [
                (ArgumentError, "supersedes average", lambda: self.call_with(plain, average=True, op=mt.Sum))
            ],
            "unknown op": lambda: [(ArgumentError, "op=9: want one of", lambda: self.call_with(plain, op=9))],
            "refused": lambda: [(mt.HorovodInternalError, "want Average or Sum", lambda: self.call_with(plain))],
            "no dimension": lambda: [
                (mt.HorovodInternalError, "rank-zero tensor", lambda: self.call_with(scalar, **self.no_splits))
            ],
            "no such root": lambda: [
                (ArgumentError, "root_rank=99: want one of", lambda: self.call_with(plain, root_rank=99))
            ],
            "splits of another type": lambda: [
                (ArgumentError, "want int32", lambda: self.call_with(plain, splits=torch.ones(self.ranks)))
            ],
            "too few splits": lambda: [
                (ArgumentError, "integers >= 0, one for each rank", lambda: self.call_with(plain, splits=[]))
            ],
            "splits beyond the rows": lambda: [
                (ArgumentError, "add up to at most", lambda: self.call_with(plain, splits=[3] * self.ranks))
            ],
            # The cases below make the ranks disagree.
            "Mismatched operations": lambda: [
                (mt.HorovodInternalError, outcome, lambda: self.call_other(plain, odd=odd))
            ],
            "not in the set": self.foreign_cases,
            "Mismatched data types": lambda: [
                (mt.HorovodInternalError, f"{outcome}.*{self.cell.dtype}", lambda: self.call_with(typed))
            ],
            "Mismatched .* tensor shapes": lambda: [(mt.HorovodInternalError, outcome, lambda: self.call_with(shaped))],
            "Mismatched reduction operation": lambda: [
                (mt.HorovodInternalError, outcome, lambda: self.call_with(plain, op=mt.Sum if odd else mt.Average))
            ],
            "Mismatched prescale and/or postscale factors": lambda: [
                (mt.HorovodInternalError, outcome, lambda: self.call_with(plain, prescale_factor=2.0 if odd else 1.0)),
                (mt.HorovodInternalError, outcome, lambda: self.call_with(plain, postscale_factor=2.0 if odd else 1.0)),
            ],
            "no dimension on one rank": lambda: [
                (mt.HorovodInternalError, "tensor shapes", lambda: self.call_with(scalar, **self.no_splits))
            ],
            "Mismatched BROADCAST root ranks": lambda: [
                (mt.HorovodInternalError, outcome, lambda: self.call_with(plain, root_rank=int(odd)))
            ],
        }
        return cases[outcome]()

    @property
    def no_splits(self) -> dict[str, Any]:
        return {"splits": None} if self.cell.operation in ALLTOALL else {}

    def call_with(self, tensor: Tensor, **options: Any) -> list[Any]:
        """Call the operation; if it fails, check that `tensor` is unchanged."""
        if self.cell.operation in BROADCAST:
            options.setdefault("root_rank", 0)
        before = tensor.clone()
        try:
            return self.call([tensor], **options)
        except (RuntimeError, ValueError):
            same(tensor, before, "input after an error")
            raise

    def call_other(self, tensor: Tensor, *, odd: bool) -> None:
        """Call the operation; the odd rank calls another operation instead."""
        if not odd:
            self.call_with(tensor)
        elif self.cell.operation in ALLGATHER:
            mt.broadcast(tensor, 0)
        else:
            mt.allgather(tensor)

    def twice(self) -> None:
        """Submit a second operation under the name of an operation in flight."""
        operation = getattr(mt, self.cell.operation)
        tensor: Any = [torch.ones(self.ranks)] if self.is_grouped else torch.ones(self.ranks)
        options: dict[str, Any] = {"root_rank": 0} if self.cell.operation in BROADCAST else {}
        handle = operation(tensor, name="twice", **options)
        try:
            operation(tensor, name="twice", **options)
        finally:
            mt.synchronize(handle)

    def foreign_cases(self) -> list[ErrorCase]:
        """Return the error that a rank gets from a process set without this rank.

        Rank 0 is the set's only member; its call succeeds.
        """
        if self.rank:
            return [
                (
                    ArgumentError,
                    "is not in ProcessSet",
                    lambda: self.call_with(torch.ones(2, 2), process_set=self.others),
                )
            ]
        self.call_with(torch.ones(2, 2), process_set=self.others)
        return []


def typed_as(cell: Cell, tensor: Tensor) -> Tensor:
    """Return `tensor` converted to the cell's type."""
    return tensor.to(getattr(torch, cell.dtype))


def sample(ranks: int, count: int, seed: int) -> list[Cell]:
    """Return a random sample of `count` cells.

    The sample has at least one cell for each outcome of each family of operations, so it can be larger than `count`.
    """
    everything = cells_of(ranks)
    generator = random.Random(seed)  # noqa: S311 -- chooses tests
    generator.shuffle(everything)
    first: dict[tuple[str, str], Cell] = {}
    for cell in everything:
        first.setdefault(
            (cell.operation.strip("_").removesuffix("_async").removeprefix("grouped_"), cell.outcome), cell
        )
    chosen = list(first.values())
    rest = [cell for cell in everything if cell not in set(chosen)]
    return [*chosen, *rest[: max(0, count - len(chosen))]]

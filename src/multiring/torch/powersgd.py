"""PowerSGD: a bucket whose matrices travel as two narrow factors.

For each matrix M of a rank (its gradient, and what it has not sent yet), with Q the same on all ranks:

    P = M Q            reduced over the ranks, then made orthonormal
    Q = M^T P          what this rank sends is P Q^T, and M - P Q^T stays for the next step; reduced over the ranks
    gradient = P Q^T

Every rank gets the same gradient to the last bit: it is made of reduced values only, by arithmetic that is the same on
all machines (`factors`). The next step begins with this Q, made orthonormal: so the factors approach the largest
singular vectors of a gradient that changes slowly, and numbers neither grow nor vanish.

Source: Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from multiring.runtime import Group, Handle
from multiring.runtime.group.handles import in_background
from multiring.torch.bucket_reductions import Kept
from multiring.torch.buckets import BucketLayout, places_in
from multiring.torch.interop import Shared, allocate
from multiring.torch.options import PowerSGD, matrix_shape
from multiring.torch.powersgd_factors import multiply, orthonormalise


class Stages:
    """The groups of both reductions of every bucket, and the order of the second ones.

    First reductions start while backward runs, second ones from threads of their own when the first have ended. Each
    kind has its own group, in which buckets follow each other in the same order on all ranks.
    """

    def __init__(self, first: Group, second: Group) -> None:
        self.first = first
        self.second = second
        self._latest: Future[None] = Future()
        self._latest.set_result(None)

    def next_turn(self) -> tuple["Future[None]", "Future[None]"]:
        """Return a future to wait for before the second reduction starts, and one to set once it has.

        Where a second reduction could not start, those behind it must not: other ranks would take one for the other.
        """
        before, self._latest = self._latest, Future()
        return before, self._latest


@dataclass(slots=True, eq=False)
class _Matrix:
    """One member that travels as factors; n x m."""

    member: int
    gradient: Tensor  # n x m: its place
    residual: Tensor  # n x m; while a reduction is going on M itself, until the factors are known
    query: Tensor  # m x rank: Q as the last step left it
    p: Tensor  # n x rank, in the arena
    q: Tensor  # m x rank, in the arena
    has_gradient: bool = False
    is_finite: bool = True

    def project(self) -> None:
        """Set `p` to this rank's M Q; M is nothing where the rank has no gradient, and what it owes waits."""
        if self.has_gradient:
            self.residual += self.gradient
            torch.mm(self.residual, self.query, out=self.p)
        else:
            self.p.zero_()

    def back_project(self) -> None:
        """Make the reduced `p` orthonormal, set `q` to this rank's M^T P, and keep what the two leave out."""
        self.is_finite = bool(self.p.isfinite().all())
        if self.is_finite:
            orthonormalise(self.p.numpy())
        if self.has_gradient and self.is_finite:
            torch.mm(self.residual.t(), self.p, out=self.q)
            self.residual.addmm_(self.p, self.q.t(), alpha=-1)
        else:
            self.q.zero_()
            if self.has_gradient:
                self.residual -= self.gradient
        if not (self.is_finite and self.q.isfinite().all()):
            # Some rank's gradient was an infinity or NaN: all ranks get NaN, and none is to owe it for ever.
            self.residual.nan_to_num_(0.0, 0.0, 0.0)

    def multiply_out(self) -> None:
        """Set the gradient to P Q^T, and Q for the next step, from the reduced factors."""
        if not (self.is_finite and self.q.isfinite().all()):
            self.gradient.fill_(torch.nan)
            return
        multiply(self.p.numpy(), self.q.numpy(), self.gradient.numpy())
        following = self.q.clone()
        # A direction that was lost would never come back: keep looking where the last step did.
        for column, is_independent in enumerate(orthonormalise(following.numpy())):
            if not is_independent:
                following[:, column] = self.query[:, column]
        self.query.copy_(following)


class Factored:
    """A bucket of float32 gradients of which matrices travel as factors; see `Reduction`.

    All P of the bucket, with the gradients that travel as they are and the flags, are one all_reduce, all Q another.
    """

    def __init__(
        self, stages: Stages, op: str, compression: PowerSGD, layout: BucketLayout, parameters: list[Tensor]
    ) -> None:
        self._stages = stages
        self._op = op
        self.places = places_in(torch.zeros(layout.count, dtype=layout.dtype), layout, parameters)
        shapes = [matrix_shape(place) for place in self.places]
        compressed = [member for member, shape in enumerate(shapes) if compression.pays(*shape)]
        others = [member for member in range(len(shapes)) if member not in compressed]
        rank = compression.rank
        counts = [shapes[member][0] * rank for member in compressed]
        counts += [self.places[member].numel() for member in others]
        self._first, pieces = _pieces(stages.first, [*counts, layout.flags])
        self._second, queries = _pieces(stages.second, [shapes[member][1] * rank for member in compressed])
        self.flags = pieces[-1].numpy()
        self._whole = [
            (_in_memory_order(self.places[member]), sent)
            for member, sent in zip(others, pieces[len(compressed) : -1], strict=True)
        ]
        self._matrices = [
            _Matrix(
                member=member,
                gradient=_in_memory_order(self.places[member]).view(shapes[member]),
                residual=torch.zeros(shapes[member]),
                query=_first_query(compression, layout.members[member], shapes[member][1]),
                p=p.view(-1, rank),
                q=q.view(-1, rank),
            )
            for member, p, q in zip(compressed, pieces, queries, strict=False)
        ]

    @property
    def sent_bytes(self) -> int:
        """As in Reduction."""
        return int(self._first.array.nbytes + self._second.array.nbytes)

    def start(self) -> Callable[[], object]:
        """As in Reduction."""
        with torch.no_grad():
            for matrix in self._matrices:
                matrix.has_gradient = bool(self.flags[matrix.member])
                matrix.project()
            for place, sent in self._whole:
                sent.copy_(place)
        first = self._stages.first.all_reduce_async(self._first.array, self._op)
        if not self._matrices:
            return partial(self._end, (first,))
        before, posted = self._stages.next_turn()
        return in_background(partial(self._go_on, first, before, posted), "PowerSGD").wait

    def _go_on(self, first: Handle, before: "Future[None]", posted: "Future[None]") -> None:
        try:
            first.wait()
            with torch.no_grad():
                for matrix in self._matrices:
                    matrix.back_project()
            before.result()
            second = self._stages.second.all_reduce_async(self._second.array, self._op)
        except BaseException as error:
            posted.set_exception(error)
            raise
        posted.set_result(None)
        self._end((second,))

    def _end(self, handles: tuple[Handle, ...]) -> None:
        for handle in handles:
            handle.wait()
        with torch.no_grad():
            for matrix in self._matrices:
                matrix.multiply_out()
            for place, sent in self._whole:
                place.copy_(sent)

    def kept(self, member: int) -> Kept:
        """As in Reduction."""
        for matrix in self._matrices:
            if matrix.member == member:
                place = self.places[member]
                residual = torch.empty_like(place)
                _in_memory_order(residual).copy_(matrix.residual.view(-1))
                return Kept(residual=residual, query=matrix.query.clone())
        return Kept()

    def restore(self, member: int, kept: Kept) -> None:
        """As in Reduction."""
        for matrix in self._matrices:
            if matrix.member != member:
                continue
            if kept.residual is not None:
                place = torch.empty_like(self.places[member]).copy_(kept.residual)
                matrix.residual.view(-1).copy_(_in_memory_order(place))
            if kept.query is not None and kept.query.shape == matrix.query.shape:  # else of another rank: begin anew
                matrix.query.copy_(kept.query)


def _pieces(group: Group, counts: list[int]) -> tuple[Shared, list[Tensor]]:
    memory = allocate(group, sum(counts), torch.float32)
    return memory, list(torch.split(memory.tensor, counts))


def _in_memory_order(dense: Tensor) -> Tensor:
    """Return the elements of a dense tensor, one after the other as they lie in memory."""
    return dense.as_strided((dense.numel(),), (1,))


def _first_query(compression: PowerSGD, index: int, columns: int) -> Tensor:
    generator = np.random.default_rng([compression.seed, index])
    query = generator.standard_normal((columns, compression.rank), np.float32)
    orthonormalise(query)
    return torch.from_numpy(query)

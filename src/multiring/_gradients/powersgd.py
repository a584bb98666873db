"""PowerSGD: a bucket whose matrices are sent as two narrow factors.

For each matrix M of a rank (its gradient plus its residual), with Q the same on all ranks:

    P = M Q            reduced over the ranks, then made orthonormal
    Q = M^T P          the rank sends P Q^T, and keeps M - P Q^T as its residual; Q is reduced over the ranks
    gradient = P Q^T

Every rank gets bit-identical gradients. They are computed from reduced values only, by arithmetic that is the same on
all machines (powersgd_factors.py). The next step starts with this Q, made orthonormal. Therefore the factors approach
the largest singular vectors of a slowly changing gradient, and numbers neither grow nor vanish.

Source: Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from multiring._gradients.buckets import BucketLayout, GradientSpec, places_in
from multiring._gradients.options import PowerSGD, matrix_shape
from multiring._gradients.powersgd_factors import multiply, orthonormalise
from multiring._gradients.reductions import CompressionState, Zeros, zeros_in_arena
from multiring._runtime import Group, Handle
from multiring._runtime.group.handles import in_background

Floats = NDArray[np.float32]

_BLOCK = 1 << 18  # elements of a matrix in one block of a product


class Stages:
    """The groups of both reductions of a bucket, and the order of second reductions.

    First reductions start during backward. A thread starts each second reduction when the first one has ended. First
    and second reductions use separate groups. In each group, the buckets have the same order on all ranks.
    """

    def __init__(self, first: Group, second: Group) -> None:
        self.first = first
        self.second = second
        self._latest: Future[None] = Future()
        self._latest.set_result(None)

    def next_turn(self) -> tuple["Future[None]", "Future[None]"]:
        """Return two futures, which keep second reductions in order.

        Wait for the first future before starting a second reduction, and set the second future afterwards. If a second
        reduction cannot start, later reductions must not start either: other ranks would confuse them.
        """
        before, self._latest = self._latest, Future()
        return before, self._latest


@dataclass(slots=True, eq=False)
class _Matrix:
    """One member that is sent as factors; n x m."""

    member: int
    gradient: Floats  # n x m: its place in the bucket
    residual: Floats  # n x m; during a reduction it holds M itself, until the factors are known
    query: Floats  # m x rank: Q of the last step
    p: Floats  # n x rank, in the arena
    q: Floats  # m x rank, in the arena
    has_gradient: bool = False
    is_finite: bool = True

    def project(self) -> None:
        """Set `p` to this rank's M Q. If the rank has no gradient, set `p` to zeros and keep the residual unchanged."""
        if self.has_gradient:
            self.residual += self.gradient
            np.matmul(self.residual, self.query, out=self.p)
        else:
            self.p.fill(0.0)

    def back_project(self) -> None:
        """Make the reduced `p` orthonormal, set `q` to this rank's M^T P, and update the residual."""
        self.is_finite = bool(np.isfinite(self.p).all())
        if self.is_finite:
            orthonormalise(self.p)
        if self.has_gradient and self.is_finite:
            np.matmul(self.residual.T, self.p, out=self.q)
            self._leave_out()
        else:
            self.q.fill(0.0)
            if self.has_gradient:
                self.residual -= self.gradient
        if not (self.is_finite and np.isfinite(self.q).all()):
            # A rank's gradient was an infinity or NaN. All ranks get NaN, and the residual must not keep it forever.
            np.nan_to_num(self.residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)

    def _leave_out(self) -> None:
        """Subtract P Q^T, with this rank's own Q, from the residual, in blocks of rows that stay in the cache."""
        rows = max(1, _BLOCK // max(1, len(self.q)))
        for start in range(0, len(self.p), rows):
            self.residual[start : start + rows] -= self.p[start : start + rows] @ self.q.T

    def multiply_out(self) -> None:
        """Set the gradient to P Q^T, and Q for the next step, from the reduced factors."""
        if not (self.is_finite and np.isfinite(self.q).all()):
            self.gradient.fill(np.nan)
            return
        multiply(self.p, self.q, self.gradient)
        following = self.q.copy()
        # A lost direction would never come back, so its column keeps the direction of the last step.
        for column, is_independent in enumerate(orthonormalise(following)):
            if not is_independent:
                following[:, column] = self.query[:, column]
        self.query[...] = following


class Factored:
    """A `Reduction` of float32 gradients whose matrices are sent as factors.

    One all_reduce sums all P of the bucket, the uncompressed gradients and the flags. Another one sums all Q.
    """

    def __init__(
        self,
        stages: Stages,
        op: str,
        compression: PowerSGD,
        layout: BucketLayout,
        specs: Sequence[GradientSpec],
        zeros: Zeros,
    ) -> None:
        self._stages = stages
        self._zeros = zeros
        self._op = op
        self._compression = compression
        self._form = layout, specs
        # The function that waits for the newest reduction of the twins. The next reduction calls it first, because it
        # needs the residual of the newest one.
        self._latest: list[Callable[[], object]] = []
        self._matrices: dict[int, _Matrix] = {}
        self._take_places()

    def _take_places(self) -> None:
        """Allocate memory; keep the residuals and Q of existing matrices."""
        (layout, specs), compression, stages, known = self._form, self._compression, self._stages, self._matrices
        self.memory = self._zeros(stages.first, layout.flags_offset, "float32")
        self.places = places_in(self.memory, layout, specs)
        # Each gradient is a flat array, in memory order.
        lines = [self.memory[at : at + spec.count] for at, spec in zip(layout.offsets, specs, strict=True)]
        shapes = [matrix_shape(spec) for spec in specs]
        compressed = [member for member, shape in enumerate(shapes) if compression.pays(*shape)]
        others = [member for member in range(len(shapes)) if member not in compressed]
        rank = compression.rank
        counts = [shapes[member][0] * rank for member in compressed]
        counts += [lines[member].size for member in others]
        self._first, pieces = _pieces(stages.first, [*counts, layout.flags])
        self._second, queries = _pieces(stages.second, [shapes[member][1] * rank for member in compressed])
        self.flags = pieces[-1]
        self._whole = [(lines[member], sent) for member, sent in zip(others, pieces[len(compressed) : -1], strict=True)]
        self._matrices = {
            member: _Matrix(
                member=member,
                gradient=lines[member].reshape(shapes[member]),
                residual=known[member].residual if known else np.zeros(shapes[member], np.float32),
                query=known[member].query
                if known
                else _first_query(compression, layout.members[member], shapes[member][1]),
                p=p.reshape(-1, rank),
                q=q.reshape(-1, rank),
            )
            for member, p, q in zip(compressed, pieces, queries, strict=False)
        }

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction sends, as encoded between hosts."""
        return int(self._first.nbytes + self._second.nbytes)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits for the result, or raises."""
        before, self._latest[:] = list(self._latest), []
        for wait in before:
            wait()
        with np.errstate(all="ignore"):  # an overflow becomes an infinity, like one in the gradients
            for matrix in self._matrices.values():
                matrix.has_gradient = bool(self.flags[matrix.member])
                matrix.project()
        for line, sent in self._whole:
            sent[...] = line
        first = self._stages.first.all_reduce_async(self._first, self._op)
        if not self._matrices:
            return partial(self._end, (first,))
        turn, posted = self._stages.next_turn()
        wait = in_background(partial(self._go_on, first, turn, posted), "PowerSGD").wait
        self._latest[:] = [wait]
        return wait

    def _go_on(self, first: Handle, before: "Future[None]", posted: "Future[None]") -> None:
        try:
            first.wait()
            with np.errstate(all="ignore"):
                for matrix in self._matrices.values():
                    matrix.back_project()
            before.result()
            second = self._stages.second.all_reduce_async(self._second, self._op)
        except BaseException as error:
            posted.set_exception(error)
            raise
        posted.set_result(None)
        self._end((second,))

    def _end(self, handles: tuple[Handle, ...]) -> None:
        for handle in handles:
            handle.wait()
        for matrix in self._matrices.values():
            matrix.multiply_out()
        for line, sent in self._whole:
            line[...] = sent

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state; call this only while no reduction runs."""
        matrix = self._matrices.get(member)
        if matrix is None:
            return CompressionState()
        return CompressionState(residual=self._shaped(member, matrix.residual).copy("K"), query=matrix.query.copy())

    def load_state(self, member: int, state: CompressionState) -> None:
        """Load the parts of `state` that this reduction uses, for `member`."""
        matrix = self._matrices.get(member)
        if matrix is None:
            return
        if state.residual is not None:
            self._shaped(member, matrix.residual)[...] = state.residual
        if state.query is not None and state.query.shape == matrix.query.shape:  # else `rank` differs
            matrix.query[...] = state.query

    def twin(self) -> "Factored":
        """See `Reduction.twin`. A twin needs the other reduction's residual, and waits for that reduction."""
        found = copy(self)
        found._take_places()  # noqa: SLF001 -- an attribute of the same class
        return found

    def _shaped(self, member: int, matrix: Floats) -> Floats:
        """Return a matrix in the shape of its member's gradient."""
        spec = self._form[1][member]
        shaped: Floats = np.ndarray(spec.shape, np.float32, matrix, 0, [4 * stride for stride in spec.strides])
        return shaped


def _pieces(group: Group, counts: list[int]) -> tuple[Floats, list[Floats]]:
    memory = zeros_in_arena(group, sum(counts), "float32")
    pieces: list[Floats] = np.split(memory, np.cumsum(counts)[:-1])
    return memory, pieces


def _first_query(compression: PowerSGD, index: int, columns: int) -> Floats:
    generator = np.random.default_rng([compression.seed, index])
    query: Floats = generator.standard_normal((columns, compression.rank), np.float32)
    orthonormalise(query)
    return query

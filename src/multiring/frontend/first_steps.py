"""The first steps of a training: do the ranks train one model, and each on samples of its own?

Nobody tells a program that forgot to broadcast its model, or to divide its samples: it trains, and to no end. So the
ranks compare what they know, twice: with the first gradients those gradients, before they are reduced, and before the
second step the parameters. Equal gradients on all ranks are worth a warning, different parameters are an error.

The ranks agree when they compare: whoever reduces tells all ranks that one of them wants to, and all of them `meet`.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.errors import MismatchError
from multiring.frontend.process_sets import global_process_set, members_of, world_now
from multiring.runtime import is_initialized
from multiring.runtime.group.handles import told_apart

UNKNOWN = 0
_SETTING = "MULTIRING_CHECK_FIRST_STEPS=0 turns this check off"
# Ranks on different processors round differently: by so many of the type's steps a parameter may differ.
_ROUNDING = 4.0

_REMEDY = "broadcast_parameters(model, root_rank=0) and broadcast_optimizer_state do"

Parameters = Callable[[], Sequence[NDArray[Any]] | None]


class Ranks(Protocol):
    """Those that compare: a Group, whose operations all ranks call in one order, or what they match by name."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""

    def all_gather(self, array: Any) -> Any:
        """Return all ranks' rows, by rank."""

    def broadcast(self, array: Any, root: int) -> Any:
        """Make `array` that of one rank, in place."""


class FirstSteps:
    """What an optimizer's ranks compare in its first steps."""

    def __init__(
        self,
        what: str,
        group: Ranks,
        names: Sequence[str],
        parameters: Parameters | None,
        *,
        sees: bool = True,
        remedy: str = "",
    ) -> None:
        """Compare nothing yet.

        Args:
            what: who compares, for errors.
            group: the ranks.
            names: of the parameters, the same on all ranks.
            parameters: returns their values now, or None where this rank cannot know them; None: no rank can.
            sees: whether gradients are compared.
            remedy: what gives all ranks the same parameters, for errors.
        """
        self._remedy = remedy or _REMEDY
        self._what = what
        self._group = group
        self._names = list(names)
        self._parameters = parameters
        self._is_on = group.size > 1 and is_initialized() and world_now().settings.check_first_steps
        self._sees = self._is_on and sees  # gradients, of the first reduction
        self._compares = self._is_on and parameters is not None
        self._steps = 0
        self._gradients = hashlib.blake2b(digest_size=8)
        self._has_gradients = False

    @property
    def wants(self) -> bool:
        """Whether this rank wants all ranks to `meet` after the reduction that is about to start."""
        return self._sees if not self._steps else self._compares

    def see(self, gradients: Iterable[NDArray[Any]]) -> None:
        """Look at some of this rank's gradients, which are about to be reduced; they come in the same order on all."""
        if not self._sees:
            return
        for each in gradients:
            content = _bytes_of(each)
            self._has_gradients = self._has_gradients or bool(content.any())
            self._gradients.update(content.data)

    def step(self) -> None:
        """Take note that the optimizer has made a step."""
        self._steps += 1

    def told(self) -> NDArray[np.int64]:
        """Return what this rank tells the others: of its gradients, and of its parameters as they are now."""
        found = np.zeros(1 + len(self._names), np.int64)
        if self._sees and self._has_gradients:
            found[0] = _number(self._gradients)
        self._sees = False
        values = self._values() if self._steps and self._compares else None
        if values is not None:
            found[1:] = [digest_of(each) for each in values]
            self._compares = False
        return found

    def told_nothing(self) -> NDArray[np.int64]:
        """Return what a rank tells that trains no more."""
        return np.zeros(1 + len(self._names), np.int64)

    def meet(self, told: NDArray[np.int64], group: Ranks | None = None) -> None:
        """Compare what the ranks tell; all of them call this, also one that knows nothing.

        Args:
            told: what `told` returned, or zeros.
            group: the same ranks, where another order of operations is wanted.

        Raises:
            MismatchError: on every rank: their parameters differ.
        """
        group = group or self._group
        rows = np.asarray(group.all_gather(told)).reshape(group.size, -1)
        if rows[0, 0] != UNKNOWN and (rows[:, 0] == rows[0, 0]).all():
            warn_of_equal_data(self._what, group, "gradients")
        known = rows[:, 1:]
        differing = [
            number for number, column in enumerate(known.T) if len(set(column[column != UNKNOWN].tolist())) > 1
        ]
        for number in differing:
            column = known[:, number]
            if not self._differ_by_rounding(group, number, column):
                raise self._difference(column, number, len(differing))

    def _values(self) -> Sequence[NDArray[Any]] | None:
        return None if self._parameters is None else self._parameters()

    def _differ_by_rounding(self, group: Ranks, number: int, column: NDArray[np.int64]) -> bool:
        """Return whether the ranks that know a parameter differ by no more than processors do; all ranks ask."""
        knows = column != UNKNOWN
        values = self._values() if knows[group.rank] else None
        own = None if values is None else np.array(values[number], order="C")
        size_bytes = np.array([-1 if own is None else own.nbytes], np.int64)
        sizes = np.asarray(group.all_gather(size_bytes))
        if len(set(sizes[knows].tolist())) > 1:
            return False
        root = int(np.flatnonzero(knows)[0])
        wanted = np.empty(int(sizes[root]), np.uint8) if own is None else _bytes_of(own).copy()
        group.broadcast(wanted, root)
        far = 0.0 if own is None else _distance(own, wanted.view(own.dtype).reshape(own.shape))
        return bool((np.asarray(group.all_gather(np.array([far]))) <= _ROUNDING).all())

    def _difference(self, column: NDArray[np.int64], number: int, count: int) -> MismatchError:
        by_rank = {rank: f"{each & (2**64 - 1):016x}" for rank, each in enumerate(column.tolist()) if each != UNKNOWN}
        more = f", and {count - 1} more of {len(self._names)}," if count > 1 else ""
        return MismatchError(
            f"{self._what}: before the second step the ranks have different values of parameter {self._names[number]}"
            f"{more} (fingerprints: {told_apart(by_rank)}), so each rank trains a model of its own. Give all ranks "
            f"rank 0's before the first step, as {self._remedy}, or load the same checkpoint on all. {_SETTING}"
        )


class _Warned:
    """Whether this job has been warned of equal data."""

    def __init__(self) -> None:
        self.is_warned = False


def warn_of_equal_data(what: str, group: Ranks, kind: str) -> None:
    """Warn, once in a job and on one rank, that all ranks have the same `kind`, as "gradients"."""
    warned = members_of(global_process_set).kept(_Warned)
    if warned.is_warned or group.rank:
        return
    warned.is_warned = True
    warnings.warn(
        f"{what}: at the first step all {group.size} ranks have the same {kind}: they train on the same samples, "
        "which is as good as one rank. Divide them, as by the loader that distribute returns, a DistributedSampler or "
        f"shard; where that is meant, {_SETTING}",
        stacklevel=2,
    )


def digest_of(array: NDArray[Any]) -> int:
    """Return a number, never UNKNOWN, of all bytes of `array`, row by row, its type and its shape."""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=8)
    digest.update(_bytes_of(array).data)
    return _number(digest)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _number(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


def _distance(own: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return by how many of their type's steps, at the size of the largest, two arrays differ; infinite for others."""
    if np.array_equal(_bytes_of(own), _bytes_of(wanted)):
        return 0.0
    kind = own.dtype
    if kind.kind in "biu?":
        return float("inf")
    wide = np.complex128 if kind.kind == "c" else np.float64
    a, b = own.astype(wide), wanted.astype(wide)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    size = float(np.abs(b).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / (size * _step_of(kind)) if size else float("inf")


def _step_of(kind: "np.dtype[Any]") -> float:
    try:
        return float(np.finfo(kind).eps)
    except (TypeError, ValueError):  # one of ml_dtypes', in older versions of NumPy
        return 2.0**-7

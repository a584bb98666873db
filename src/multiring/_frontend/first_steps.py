"""Checks of a training's first steps: the ranks must train one model, each rank on its own samples.

A program that forgets to broadcast its model, or to divide its samples, fails silently: it trains a useless model. The
ranks therefore compare twice. In the first step they compare their gradients before the reduction. Before the second
step they compare their parameters. Equal gradients on all ranks cause a warning, and different parameters an error.

All ranks compare at the same time: the reduction tells all ranks that one of them wants to compare, and then every rank
calls `meet`.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.process_sets import global_process_set, members_of, world_now
from multiring._runtime import is_initialized
from multiring._runtime.group.handles import told_apart
from multiring.errors import MismatchError

UNKNOWN = 0
_SETTING = "MULTIRING_CHECK_FIRST_STEPS=0 turns this check off"
# Ranks on different processors round differently. A parameter may differ by this number of the type's epsilons.
_ROUNDING = 4.0

_REMEDY = "broadcast_parameters(model, root_rank=0) and broadcast_optimizer_state do"

Parameters = Callable[[], Sequence[NDArray[Any]] | None]


class Ranks(Protocol):
    """The ranks that compare.

    Either a Group, or an object with the same methods that matches operations by name.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    def all_gather(self, array: Any) -> Any:
        """Return all ranks' rows, in the order of the ranks."""

    def broadcast(self, array: Any, root: int) -> Any:
        """Overwrite `array` with the array of rank `root`."""


class FirstSteps:
    """Compares gradients and parameters of the ranks in an optimizer's first steps."""

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
        """Prepare the comparison.

        Args:
            what: the name of the optimizer or function that compares, for errors.
            group: the ranks.
            names: the names of the parameters, the same on all ranks.
            parameters: returns the current values, or None if this rank cannot read them. Pass None if no rank can.
            sees: whether gradients are compared.
            remedy: how a program gives all ranks the same parameters, for errors.
        """
        self._remedy = remedy or _REMEDY
        self._what = what
        self._group = group
        self._names = list(names)
        self._parameters = parameters
        self._is_on = group.size > 1 and is_initialized() and world_now().settings.check_first_steps
        self._sees = self._is_on and sees  # whether to read further gradients of the first reduction
        self._compares = self._is_on and parameters is not None
        self._steps = 0
        self._gradients = hashlib.blake2b(digest_size=8)
        self._has_gradients = False

    @property
    def wants(self) -> bool:
        """Whether this rank wants all ranks to call `meet` after the reduction that is about to start."""
        return self._sees if not self._steps else self._compares

    def see(self, gradients: Iterable[NDArray[Any]]) -> None:
        """Add gradients of this rank, before they are reduced, to the digest.

        All ranks pass them in the same order.
        """
        if not self._sees:
            return
        for each in gradients:
            content = _bytes_of(each)
            self._has_gradients = self._has_gradients or bool(content.any())
            self._gradients.update(content.data)

    def step(self) -> None:
        """Count a step of the optimizer."""
        self._steps += 1

    def told(self) -> NDArray[np.int64]:
        """Return this rank's digests for `meet`: the digest of its gradients and of each parameter."""
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
        """Return digests of zeros. A rank that has stopped training passes them to `meet`."""
        return np.zeros(1 + len(self._names), np.int64)

    def meet(self, told: NDArray[np.int64], group: Ranks | None = None) -> None:
        """Compare the digests of all ranks.

        Every rank calls it, also a rank without digests.

        Args:
            told: the result of `told` or `told_nothing`.
            group: another group of the same ranks, if the comparison cannot use the constructor's group now.

        Raises:
            MismatchError: on every rank: the ranks' parameters differ.
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
        """Return whether a parameter differs between ranks by rounding errors only. All ranks call it."""
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
            f"the values of rank 0 before the first step, as {self._remedy}, or load the same checkpoint on all ranks. "
            f"{_SETTING}"
        )


class _Warned:
    """Whether the warning of equal data has been issued in this job."""

    def __init__(self) -> None:
        self.is_warned = False


def warn_of_equal_data(what: str, group: Ranks, kind: str) -> None:
    """Warn on rank 0, once per job, that all ranks have the same data.

    `kind` names the data, for example "gradients".
    """
    warned = members_of(global_process_set).kept(_Warned)
    if warned.is_warned or group.rank:
        return
    warned.is_warned = True
    warnings.warn(
        f"{what}: at the first step all {group.size} ranks have the same {kind}: they train on the same samples, "
        "so they learn no more than one rank would. Divide the samples, for example by the loader that distribute "
        f"returns, a DistributedSampler or shard. If equal samples are intended, {_SETTING}",
        stacklevel=2,
    )


def digest_of(array: NDArray[Any]) -> int:
    """Return a digest of the bytes, type and shape of `array`. The digest is never UNKNOWN."""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=8)
    digest.update(_bytes_of(array).data)
    return _number(digest)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _number(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


def _distance(own: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return the largest difference of two arrays, in epsilons of their type at the largest element.

    Arrays that cannot be compared this way, such as different integers, have an infinite distance.
    """
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
    except (TypeError, ValueError):  # a type of ml_dtypes, which older versions of NumPy do not know
        return 2.0**-7

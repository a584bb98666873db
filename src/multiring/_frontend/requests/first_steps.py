"""Compare gradients and parameters in the first steps of reductions that native code requests.

A program compiled by TensorFlow or JAX cannot determine the number of its step. This module therefore examines the
first two requests of each reduction. The field `root` of a request, which reductions do not use otherwise, has the
number of the reduction.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend import array_collectives
from multiring._frontend.first_steps import FirstSteps, Parameters
from multiring._frontend.process_sets import Members
from multiring._frontend.reduce_ops import Sum

Compare = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A reduction of gradients whose first steps the ranks compare.

    what: the optimizer or function that reduces, for errors.
    names: the names of the parameters, which come from `parameters` or from requests with `follows`.
    parameters: returns the current values of the parameters; None if this process cannot read them.
    remedy: how a program gives all ranks the same parameters, for errors.
    sees: whether local gradients are compared.
    flagged: the type of the requests whose last array is a flag. The flag is 1 if the program must compare parameters.
    follows: the number of the reduction whose program passes its parameters in these requests; 0 if there is none.
    part: distinguishes requests with the same `follows`; the same on all ranks.
    keeps: returns whether the variables of the reduction still exist.
    """

    what: str
    names: Sequence[str] = ()
    parameters: Parameters | None = None
    remedy: str = ""
    sees: bool = True
    flagged: str = ""
    follows: int = 0
    part: int = 0
    keeps: Callable[[], bool] = lambda: True


class _Registry:
    """The watched reductions of this process, by number."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.found: dict[int, Watched] = {}
        self.next = itertools.count(1)


_registry = _Registry()


def watch(key: Hashable, make: Callable[[], Watched]) -> int:
    """Return the number of the reduction that `key` identifies in this process.

    Args:
        key: identifies the reduction.
        make: describes the reduction; it is called if the reduction is new.
    """
    number = _registry.numbers.get(key)
    if number is None or not _registry.found[number].keeps():
        if number is not None:
            del _registry.found[number]
        number = next(_registry.next)
        _registry.found[number] = make()
        _registry.numbers[key] = number
    return number


def watched_variables(
    variables: Sequence[Any], values: Callable[[Sequence[Any]], Sequence[Any] | None], **more: Any
) -> int:
    """Return the number of the reduction of these variables' gradients.

    Args:
        variables: the variables; only weak references to them are stored.
        values: returns the variables' values as arrays for NumPy; None if it cannot read them.
        more: other fields of Watched.
    """

    def make() -> Watched:
        references = [weakref.ref(each) for each in variables]

        def parameters() -> list[NDArray[Any]] | None:
            living = [each() for each in references]
            found = None if any(each is None for each in living) else values(living)
            return None if found is None else [np.asarray(each) for each in found]

        def keeps() -> bool:
            return all(each() is not None for each in references)

        names = [str(getattr(each, "path", None) or each.name) for each in variables]
        return Watched(names=names, parameters=parameters, keeps=keeps, **more)

    return watch((more["what"], more.get("sees", True), *map(id, variables)), make)


class NamedRanks:
    """The ranks of a process set, with operations matched by name.

    A rank that has joined contributes zeros.
    """

    def __init__(self, members: Members, name: str) -> None:
        self._members = members
        self._name = name
        self._numbers = itertools.count(1)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._members.size

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._members.rank

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' rows, in the order of the ranks; rows of ranks that have joined are zeros."""
        rows = np.zeros((self.size, *array.shape), array.dtype)
        rows[self.rank] = array
        return self._sum(rows).reshape(-1, *array.shape[1:])

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Overwrite `array` with the array of rank `root`."""
        array[...] = self._sum(array if self.rank == root else np.zeros_like(array))

    def _sum(self, array: NDArray[Any]) -> NDArray[Any]:
        # Use a sum, because ranks that have joined take part only in allreduces.
        name = f"{self._name}.{next(self._numbers)}"
        return array_collectives.allreduce(array, Sum, name=name, process_set=self._members)


class FirstStepsComparison:
    """Compares the first two steps of one reduction, in one membership."""

    def __init__(self, members: Members, watched: Watched) -> None:
        self.watched = watched
        self.name = ""
        self.steps = 0  # the number of steps that have begun
        self._members = members
        self._brought: list[NDArray[Any]] | None = None
        ranks = NamedRanks(members, "")
        self._first = FirstSteps(
            watched.what, ranks, watched.names, self._parameters, sees=watched.sees, remedy=watched.remedy
        )

    def _parameters(self) -> Sequence[NDArray[Any]] | None:
        return self._brought if self.watched.parameters is None else self.watched.parameters()

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one."""
        return self._members.size == 1

    @property
    def is_over(self) -> bool:
        """Whether all comparisons have been started, or there is no rank to compare with."""
        return self.steps > 1 or self.is_alone

    def begin(self, name: str | None, gradients: Sequence[NDArray[Any]]) -> Compare | None:
        """Start a step whose gradients are about to be reduced.

        Args:
            name: the name by which the ranks match the reduction.
            gradients: this rank's gradients.

        Returns:
            A function that compares the ranks, to be called after the reduction; None if this step compares nothing.
        """
        if self.is_over:
            return None
        self.name = self._members.kept(Comparisons).name_of(name)
        if not self.steps:
            self._first.see(gradients)
        compares = self.watched.sees if not self.steps else bool(self.watched.parameters)
        told = self._first.told() if compares else None
        self._first.step()
        self.steps += 1
        return None if told is None else partial(self._first.meet, told, NamedRanks(self._members, self.name))

    def compare(self, parameters: list[NDArray[Any]]) -> None:
        """Compare parameters that a program passes before its second step.

        Raises:
            MismatchError: on every rank: the ranks' parameters differ.
        """
        before = self._members.kept(Comparisons).of(self.watched.follows)
        if self.is_over or before is None or before.steps != 2:
            return
        self.steps = 2
        self._first.step()
        self._brought = parameters
        try:
            self._first.meet(self._first.told(), NamedRanks(self._members, f"{before.name}.{self.watched.part}"))
        finally:
            self._brought = None


class Comparisons:
    """The comparisons of one membership of a process set."""

    def __init__(self) -> None:
        self._found: dict[int, FirstStepsComparison] = {}
        self._numbers = itertools.count(1)

    def of(self, number: int, members: Members | None = None) -> FirstStepsComparison | None:
        """Return the comparison of a reduction; None if there is none.

        With `members`, create a missing comparison.
        """
        found = self._found.get(number)
        watched = _registry.found.get(number)
        if found is None and watched is not None and members is not None:
            found = self._found.setdefault(number, FirstStepsComparison(members, watched))
        return found

    def name_of(self, name: str | None) -> str:
        """Return the name by which the ranks match a comparison.

        Unnamed requests have the same order on all ranks.
        """
        return f"first steps of {name}" if name else f"first steps {next(self._numbers)}"


def comparison_of(members: Members, number: int) -> FirstStepsComparison | None:
    """Return the comparison of the reduction with this number; None if the reduction is not watched."""
    return members.kept(Comparisons).of(number, members) if number else None

"""The first steps of reductions that native code asks for: what their requests show of gradients and parameters.

A program that TensorFlow or JAX has compiled cannot ask which step it makes. Its requests can: the first two of each
reduction are looked at here, on their way to the ranks. A request says which reduction it is of by a number in its
field `root`, for which a reduction has no other use.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.frontend import array_collectives
from multiring.frontend.first_steps import FirstSteps, Parameters
from multiring.frontend.process_sets import Members
from multiring.frontend.reduce_ops import Sum

Compare = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A reduction of gradients whose first steps the ranks compare.

    what: who reduces, for errors.
    names: of the parameters that `parameters` returns, or that the requests of `follows` bring.
    parameters: returns their values now; None: this process cannot read them.
    remedy: how to give all ranks the same ones.
    sees: whether local gradients are compared.
    flagged: the type of the requests whose last array is a flag: 1 where the program shall look at its parameters.
    follows: the number of the reduction whose program brings its parameters here; 0: none.
    part: tells such requests apart, the same on all ranks.
    keeps: whether what it is about is still there.
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
    """The reductions of this process, by their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.found: dict[int, Watched] = {}
        self.next = itertools.count(1)


_registry = _Registry()


def watch(key: Hashable, make: Callable[[], Watched]) -> int:
    """Return the number of the reduction that `key` stands for in this process; `make` describes a new one."""
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
        variables: they are not kept alive.
        values: returns their values as NumPy takes them; None where it cannot.
        more: fields of Watched.
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
    """The ranks of a process set, for operations that they match by name; a rank that has joined tells nothing."""

    def __init__(self, members: Members, name: str) -> None:
        self._members = members
        self._name = name
        self._numbers = itertools.count(1)

    @property
    def size(self) -> int:
        """How many there are."""
        return self._members.size

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self._members.rank

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return all ranks' rows, by rank; zeros of those that have joined."""
        rows = np.zeros((self.size, *array.shape), array.dtype)
        rows[self.rank] = array
        return self._sum(rows).reshape(-1, *array.shape[1:])

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Make `array` that of one rank, in place."""
        array[...] = self._sum(array if self.rank == root else np.zeros_like(array))

    def _sum(self, array: NDArray[Any]) -> NDArray[Any]:
        # A sum, since it is what ranks that have joined contribute to.
        name = f"{self._name}.{next(self._numbers)}"
        return array_collectives.allreduce(array, Sum, name=name, process_set=self._members)


class Comparison:
    """The first two steps of one reduction, in one membership."""

    def __init__(self, members: Members, watched: Watched) -> None:
        self.watched = watched
        self.name = ""
        self.steps = 0  # that have begun
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
        """Whether there is no other rank."""
        return self._members.size == 1

    @property
    def is_over(self) -> bool:
        """Whether nothing is compared any more."""
        return self.steps > 1 or self.is_alone

    def begin(self, name: str | None, gradients: Sequence[NDArray[Any]]) -> Compare | None:
        """Take note of a step, whose gradients are about to be reduced; return what compares when they are.

        Args:
            name: what the ranks match the reduction by.
            gradients: of this rank.
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
        """Compare parameters that a program brings, before its second step.

        Raises:
            MismatchError: on every rank: they differ.
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
    """Those of one membership of a process set."""

    def __init__(self) -> None:
        self._found: dict[int, Comparison] = {}
        self._numbers = itertools.count(1)

    def of(self, number: int, members: Members | None = None) -> Comparison | None:
        """Return that of a reduction, which is made where `members` are given; None: there is none."""
        found = self._found.get(number)
        watched = _registry.found.get(number)
        if found is None and watched is not None and members is not None:
            found = self._found.setdefault(number, Comparison(members, watched))
        return found

    def name_of(self, name: str | None) -> str:
        """Return what ranks match a comparison by: requests without a name come in the same order on all ranks."""
        return f"first steps of {name}" if name else f"first steps {next(self._numbers)}"


def comparison_of(members: Members, number: int) -> Comparison | None:
    """Return what compares the first steps of the reduction with this number; None where nobody asked for it."""
    return members.kept(Comparisons).of(number, members) if number else None

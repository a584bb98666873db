"""Process sets as in Horovod, which select the ranks of an operation, and the Group behind each set."""

import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from multiring._arguments import whole
from multiring._frontend.errors import internal_errors, not_initialized
from multiring._frontend.follow_ups import FollowUps
from multiring._frontend.horovod_words import speaks_horovod
from multiring._frontend.mpi_communicators import is_communicator, ranks_of, require_job_is_world
from multiring._frontend.neutral_contributions import neutral_contribution
from multiring._frontend.submission_line import SubmissionLine
from multiring._runtime import Group
from multiring._runtime.bootstrap.rank_process import RankPosition
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.job.job import current, is_rank, place, was_left
from multiring._runtime.job.job import in_part as part_of_job
from multiring._runtime.job.membership import Membership
from multiring._runtime.job.rank_or_worker import WorkerError
from multiring._runtime.job.world import World
from multiring._runtime.named.named import NamedOperations
from multiring.errors import ArgumentError, StateError

Kind = TypeVar("Kind")


class ProcessSet:
    """Some ranks of the job.

    The set can be used after it was passed to `init` or `add_process_set`.

    Args:
        ranks_or_comm: the ranks, in any order; or an mpi4py communicator, in a job that mpiexec started. Ranks may pass
            different communicators made by one Split. Each rank is then in the set of its own communicator.

    Raises:
        ArgumentError: `ranks_or_comm` is neither a list of ranks nor a communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm, self.ranks = ranks_or_comm, sorted(ranks_of(ranks_or_comm))
            return
        found = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        ranks = [] if found is None else [whole(rank) for rank in found]
        if found is None or None in ranks:
            raise ArgumentError(
                f"ProcessSet({ranks_or_comm!r}): ProcessSet should be initialized with a list of process ranks, or a "
                "communicator of mpi4py"
            )
        self.ranks = sorted(rank for rank in ranks if rank is not None)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if the set is not initialised."""
        return None if self.process_set_id is None else len(_sets_now().known(self))

    def rank(self) -> int | None:
        """Return this rank's number in the set; None if the set is not initialised.

        Raises:
            ArgumentError: this rank is not in the set.
        """
        return None if self.process_set_id is None else members_of(self).group.rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if the set is not initialised."""
        return None if self.process_set_id is None else _sets_now().own_rank in _sets_now().known(self)

    def invalidate(self) -> None:
        """Clear the object after its set was removed."""
        self.process_set_id = self.ranks = self.mpi_comm = None


class Reducer(Protocol):
    """Reduces an optimizer's gradients in a separate group."""

    def contribute_neutrally(self) -> None:
        """Contribute neutral elements to the other ranks' reductions, until all ranks do so."""


class Members:
    """The ranks of a process set, for use by one of these ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group  # for operations that all ranks call in the same order
        self.follow_ups = FollowUps(group)
        self.named = NamedOperations(group, partial(neutral_contribution, follow_ups=self.follow_ups))
        self.rank = group.rank
        self.size = group.size
        self.line = SubmissionLine()  # the operations that wait for a copy from a device before they are posted
        self.in_flight: set[str] = set()
        self.reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self.is_over = False  # the set was closed by `shutdown` or removed; rebuild dependent objects
        self._kept: dict[Callable[[], Any], Any] = {}
        self._joins = 0
        self._numbers = itertools.count(1)

    def kept(self, kind: Callable[[], Kind]) -> Kind:
        """Return the set's object of `kind`, which the first call creates.

        Adapters store their state of a set here.
        """
        found: Kind | None = self._kept.get(kind)
        if found is None:
            found = self._kept.setdefault(kind, kind())
        return found

    def close(self) -> None:
        """Close the named operations of these ranks."""
        self.is_over = True
        self.line.close()
        self.named.close()
        self.follow_ups.close()

    def next_number(self) -> str:
        """Return the number of the next unnamed operation.

        It is the same on all ranks of the set.
        """
        number = next(self._numbers)
        return f"{self._joins}.{number}" if self._joins else str(number)

    def count_anew(self) -> None:
        """Restart the numbers after all ranks have joined.

        Ranks that had joined did not count the other ranks' operations.
        """
        self._joins += 1
        self._numbers = itertools.count(1)


global_process_set = ProcessSet([])
"""The set of all ranks, the default of all operations."""
global_process_set.process_set_id = 0


_GROUPS = 1 << 20  # the first number for members of groups that are not process sets


class _Sets:
    """The process sets of one membership of the job. Changes are the same on every rank, in the same order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.own_rank = world.membership.rank
        self.is_dynamic = False
        self.promised: tuple[ProcessSet, ...] = ()  # of a newcomer that is not let in yet
        self.members: dict[int, Members] = {0: Members(world.group)}
        self.ranks: dict[int, tuple[int, ...]] = {0: tuple(range(world.membership.size))}
        self.objects: dict[int, list[ProcessSet]] = {0: [global_process_set]}
        global_process_set.ranks = list(self.ranks[0])

    def known(self, process_set: ProcessSet) -> tuple[int, ...]:
        """Return the ranks of `process_set`; raise ArgumentError if it is not one of these sets."""
        found = self.ranks.get(process_set.process_set_id) if process_set.process_set_id is not None else None
        if found is None:
            raise ArgumentError(f"{process_set} is not known; want a set that was passed to init or add_process_set")
        return found

    def add(self, process_set: ProcessSet) -> None:
        """Make the set.

        For MPI communicators, make also the other ranks' sets, in the order of their lowest ranks.
        """
        if process_set.mpi_comm is None:
            self._add(process_set)
            return
        require_job_is_world(self.own_rank, len(self.ranks[0]))
        mask = np.zeros(len(self.ranks[0]), np.uint8)
        mask[process_set.ranks] = 1
        with internal_errors("add_process_set"):
            masks = np.asarray(self.world.group.all_gather(mask, label="add_process_set")).reshape(-1, len(mask))
        own = tuple(process_set.ranks or ())
        for ranks in sorted({tuple(np.flatnonzero(each).tolist()) for each in masks} - {()}):
            if not own:  # MPI_COMM_NULL: this rank is not in the set that the other ranks make
                own, process_set.ranks = ranks, list(ranks)
            self._add(process_set if ranks == own else ProcessSet(ranks))

    def _add(self, process_set: ProcessSet) -> None:
        self.make(process_set, next(each for each in itertools.count(1) if each not in self.ranks))

    def make(self, process_set: ProcessSet, number: int) -> None:
        """Make the set, with a number that is not in use."""
        ranks = self._checked(process_set)
        group = self._agreed(f"add_process_set.{number}", ranks)
        self.ranks[number] = ranks
        self.objects[number] = [process_set]
        if group is not None:
            self.members[number] = Members(group)
        process_set.process_set_id = number

    def make_again(self, objects: list[ProcessSet], number: int) -> None:
        """Make the set of a former generation, with the number that it had."""
        ranks = tuple(objects[0].ranks or ())
        self.ranks[number], self.objects[number] = ranks, list(objects)
        if self.own_rank in ranks:  # all ranks know the former sets, so they need not agree on these
            self.members[number] = Members(self.world.group.subgroup_named(ranks, f"process set {number}"))
        for each in objects:
            each.process_set_id = number

    def _agreed(self, name: str, ranks: tuple[int, ...]) -> Group | None:
        with internal_errors(name):
            return self.world.group.subgroup(ranks)

    def remove(self, process_set: ProcessSet) -> None:
        ranks, number = self.known(process_set), process_set.process_set_id or 0
        with internal_errors("remove_process_set"):
            self.world.group.barrier(label=f"remove_process_set {number}, ranks {list(ranks)}")
        del self.ranks[number]
        members = self.members.pop(number, None)
        if members is not None:
            members.close()
        for each in self.objects.pop(number):
            each.invalidate()

    def _checked(self, process_set: ProcessSet) -> tuple[int, ...]:
        ranks = tuple(process_set.ranks or ())
        size = len(self.ranks[0])
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
            raise ArgumentError(f"{process_set}: want different ranks of the job, 0 to {size - 1}, and at least one")
        for number, others in self.ranks.items():
            if others == ranks:
                raise ArgumentError(f"A process set with the same ranks exists already: process set {number}, {others}")
        return ranks

    def number_of(self, group: Group) -> int:
        """Return the number of a group's members; register them if they are new."""
        for number, members in self.members.items():
            if members.group is group:
                return number
        number = next(each for each in itertools.count(_GROUPS) if each not in self.members)
        self.members[number] = Members(group)
        return number

    def close(self) -> None:
        """Close all sets. Their objects may be passed to `init` again."""
        for members in self.members.values():
            members.close()
        for objects in self.objects.values():
            for each in objects:
                if each is not global_process_set:
                    each.process_set_id = None


def open_sets(process_sets: Iterable[ProcessSet], *, is_dynamic: bool) -> None:
    """Make the process sets of a job that this process has just joined.

    Every rank calls it.

    Raises:
        ArgumentError: two sets are equal, or a set has all ranks.
    """
    sets = _sets_now()
    sets.is_dynamic = is_dynamic
    for each in process_sets:
        if not isinstance(each, ProcessSet):
            raise ArgumentError(f"process_sets has a {type(each).__name__}; want ProcessSet objects, or 'dynamic'")
        sets.add(each)


def know_sets(process_sets: Iterable[ProcessSet], *, is_dynamic: bool = False) -> None:
    """Set the numbers of `process_sets`. The job must already have sets of these ranks.

    The call is local. `is_dynamic` says that the program wants to add sets later.

    Raises:
        ArgumentError: the job has no set of these ranks, or no sets can be added to it.
    """
    sets = _sets_now()
    if is_dynamic and not sets.is_dynamic:
        raise ArgumentError(
            "process_sets='dynamic': this process has joined the job already, without dynamic process sets; call "
            "shutdown before init, or pass process_sets='dynamic' to the first init"
        )
    numbers = {ranks: number for number, ranks in sets.ranks.items()}
    for each in process_sets:
        number = numbers.get(tuple(each.ranks or ()))
        if number is None:
            raise ArgumentError(
                f"{each} is not known, and this process has joined the job already; call shutdown before init, or use "
                "add_process_set"
            )
        each.process_set_id = number
        if each not in sets.objects[number]:
            sets.objects[number].append(each)


def close_sets() -> None:
    """Close the process sets before the process leaves the job."""
    sets = current().job_objects.take(_Sets) if is_rank() else None
    if sets is not None:
        sets.close()


@contextmanager
def in_part(membership: Membership, end: GenerationEnd) -> Iterator[Group]:
    """Make some ranks of the job a job of their own inside the block; see `in_part` of _runtime/job/job.py.

    It begins with the set of its ranks. Its sets are closed at the end of the block, and those of the job come back.
    """
    ranks = global_process_set.ranks
    try:
        with part_of_job(membership, end) as world:
            global_process_set.ranks = list(range(membership.size))
            try:
                yield world.group
            finally:
                close_sets()
    finally:
        global_process_set.ranks = ranks


def sets_to_keep() -> tuple[dict[int, list[ProcessSet]], bool]:
    """Return the objects of each set by its number, and whether sets are dynamic.

    The set of all ranks is not included.
    """
    sets = _sets_now()
    return {number: list(objects) for number, objects in sets.objects.items() if number}, sets.is_dynamic


def sets_to_keep_by_process() -> tuple[dict[int, list[ProcessSet]], dict[int, tuple[int, ...]], bool]:
    """Return the first result of `sets_to_keep`, the processes of each set, and whether sets are dynamic.

    The numbers of the processes stay the same in all generations of the job.
    """
    sets, (kept, is_dynamic) = _sets_now(), sets_to_keep()
    ids = sets.world.membership.ids
    return kept, {number: tuple(ids[rank] for rank in sets.ranks[number]) for number in kept}, is_dynamic


def keep_sets_of_processes(
    kept: Mapping[int, list[ProcessSet]], processes: Mapping[int, Sequence[int]], *, is_dynamic: bool
) -> None:
    """Make the process sets of the former generation again, with the same numbers and without lost ranks.

    A set whose ranks are all lost is removed. Two sets may have the same ranks now. Every rank calls it.

    Args:
        kept: the objects of each set by its number.
        processes: the processes of each set.
        is_dynamic: whether sets can be added later.
    """
    sets = _sets_now()
    sets.is_dynamic = is_dynamic
    ranks = {number: rank for rank, number in enumerate(sets.world.membership.ids)}
    for number, objects in sorted(kept.items()):
        left = [ranks[each] for each in processes[number] if each in ranks]
        for each in objects:
            each.ranks = list(left)
            if not left:
                each.invalidate()
        if left:
            sets.make_again(objects, number)


def promise_sets(process_sets: Iterable[ProcessSet], *, is_dynamic: bool) -> None:
    """Remember the process sets of a newcomer's program, until the ranks let it in."""
    sets = _sets_now()
    sets.promised, sets.is_dynamic = tuple(process_sets), is_dynamic


def promised_sets() -> tuple[tuple[ProcessSet, ...], bool]:
    """Return the arguments of `promise_sets`."""
    sets = _sets_now()
    return sets.promised, sets.is_dynamic


def adopt_sets(promised: Sequence[ProcessSet], told: str, former: Sequence[int | None], *, is_dynamic: bool) -> None:
    """Know the process sets of the ranks that let this newcomer in. The call is local.

    Args:
        promised: the sets of the program. They become the sets that the ranks made of theirs.
        told: the processes of each set, by its number, as JSON.
        former: the number that each rank's process had there; None for a newcomer.
        is_dynamic: whether sets can be added later.
    """
    own, ids = dict(enumerate(promised, 1)), _sets_now().world.membership.ids
    known = {int(number): moved(ones, former, ids) for number, ones in json.loads(told or "{}").items()}
    kept = {number: [own.get(number, ProcessSet(()))] for number in known}
    keep_sets_of_processes(kept, known, is_dynamic=is_dynamic)


def moved(processes: Iterable[int], former: Sequence[int | None], ids: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers `ids` of processes that had the numbers `former`, without processes that are lost."""
    now = dict(zip(former, ids, strict=True))
    return tuple(now[each] for each in processes if each in now)


def keep_sets(kept: Mapping[int, list[ProcessSet]]) -> None:
    """Make the process sets of the previous job again, with the same numbers.

    Traced programs contain these numbers. Every rank calls it.

    Args:
        kept: the first result of `sets_to_keep`.

    Raises:
        ArgumentError: a rank of a set is not in the job.
    """
    sets = _sets_now()
    for number, (first, *others) in sorted(kept.items()):
        sets.make(first, number)
        know_sets(others)


def add_process_set(process_set: Any) -> ProcessSet:
    """Make a process set, and return it.

    Every rank of the job calls it, with the same ranks.

    Args:
        process_set: a ProcessSet, or ranks as for ProcessSet.

    Raises:
        ArgumentError: the set exists already, a rank is not in the job, or sets were not made dynamic by
            `init(process_sets="dynamic")` or HOROVOD_DYNAMIC_PROCESS_SETS=1.
        CollectiveError: on every rank: the ranks asked for different sets.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _dynamic("add").add(found)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, and return whether the set existed.

    Every rank of the job calls it. The set of all ranks cannot be removed; the result is then False.

    Raises:
        ArgumentError: sets were not made dynamic.
        CollectiveError: on every rank: the ranks asked for different sets.
    """
    if not process_set.process_set_id:
        return False
    _dynamic("remove").remove(process_set)
    return True


def _dynamic(what: str) -> _Sets:
    sets = _sets_now()
    if not sets.is_dynamic:
        whose = "HOROVOD" if speaks_horovod() else "MULTIRING"
        raise ArgumentError(
            f"{what}_process_set: process sets are fixed; set {whose}_DYNAMIC_PROCESS_SETS=1, or call "
            'init(process_sets="dynamic")'
        )
    return sets


def members_of(process_set: ProcessSet | Members) -> Members:
    """Return the members of `process_set`, which must include this rank.

    A Members object is returned as it is.

    Raises:
        ArgumentError: this rank is not in the set, or `process_set` is not a known set.
        NotInitializedError: the call came before `init` or after `shutdown`.
    """
    if isinstance(process_set, Members):
        return process_set
    sets = _sets_now()
    try:
        return sets.members[process_set.process_set_id]  # type: ignore[index] # None is not a key
    except (KeyError, AttributeError):
        _refuse(process_set, sets)


def number_of_group(group: Group) -> int:
    """Return the number for `members_numbered` of a group of this job.

    The group need not belong to a process set. The call is local.
    """
    return _sets_now().number_of(group)


def numbered_set(number: int) -> ProcessSet:
    """Return the process set with this number.

    Raises:
        ArgumentError: there is no such set.
    """
    found = _sets_now().objects.get(number)
    if found is None:
        raise ArgumentError(f"process set {number} is not known; want one of {sorted(_sets_now().ranks)}")
    return found[0]


def members_numbered(number: int) -> Members:
    """Return the members of the process set or group with this number.

    The errors are as in `members_of`.
    """
    found = _sets_now().members.get(number)
    return members_of(numbered_set(number)) if found is None else found


def no_process_set(found: Any) -> ArgumentError:
    """Return the error for an argument `process_set` that is not a process set."""
    ranks = list(found) if isinstance(found, list | tuple | range) else [0, 1]
    return ArgumentError(
        f"process_set={found!r}: want a ProcessSet: on every rank `mine = ProcessSet({ranks})`, "
        "`init(process_sets=[mine])`, and then process_set=mine; without process_set all ranks take part"
    )


def _refuse(process_set: Any, sets: _Sets) -> NoReturn:
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    ranks = sets.known(process_set)
    raise ArgumentError(f"rank {sets.own_rank} is not in {process_set}: only ranks {list(ranks)} may use it")


def world_rank_in(members: Members, root_rank: int) -> int:
    """Return the rank within `members` of `root_rank`, a rank of the whole job.

    Raises:
        ArgumentError: `root_rank` is not in the set.
    """
    try:
        return members.group.ranks.index(whole(root_rank))
    except ValueError:
        raise ArgumentError(
            f"root_rank={root_rank!r}: want one of the set's ranks, {list(members.group.ranks)}, as they are numbered "
            "in the whole job"
        ) from None


def world_now() -> World:
    """Return the job that this process is in.

    Raises:
        NotInitializedError: the call came before `init`, after `shutdown`, or in a fork of a rank.
    """
    try:
        return current()
    except WorkerError:
        raise
    except StateError as error:
        raise not_initialized(error, was_before=was_left()) from error


def place_now() -> RankPosition:
    """Return the position of this process in its job.

    A multiprocessing worker gets the position of its rank.

    Raises:
        NotInitializedError: the call came before `init`, after `shutdown`, or in another fork of a rank.
    """
    try:
        return place()
    except StateError as error:
        raise not_initialized(error, was_before=was_left()) from error


def _sets_now() -> _Sets:
    """Return the sets of this process's job. After `multiring.init`, only the set of all ranks exists."""
    world = world_now()
    return world.job_objects.get(_Sets) or world.job_objects.made(_Sets, lambda: _Sets(world))

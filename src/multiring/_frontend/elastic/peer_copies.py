"""Copies of each rank's own state: two on this rank, of the last commits, and one of each in a peer's memory.

A commit copies the state into memory of this rank, and sends it from there while the training goes on. The ranks begin
a commit only when all copies of the former one are whole; until then nothing of the one before is overwritten. So at
any time all copies of one commit are whole, and `multiring._agreement.kept_commits` finds it after a loss.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from multiring._agreement.kept_commits import CommitFound, CommitPlace, Kept
from multiring._frontend.elastic.snapshot import Bytes, Outline, value_in
from multiring._frontend.errors import internal_errors
from multiring._frontend.object_collectives import allgather_object
from multiring._frontend.process_sets import Members, global_process_set, members_of, world_now
from multiring._runtime import Group, Handle
from multiring._topology.copies import copy_holders
from multiring.errors import MultiringError, StateError

_WHAT = "copies of own states"
_MORE = 4096  # bytes by which a pickled state may grow without new memory


class PeerCopies:
    """The copies that this rank has, and the transfers in flight."""

    def __init__(self) -> None:
        self._places: dict[int, CommitPlace] = {}  # by commit, this rank's place at it
        self._own: dict[int, Bytes] = {}  # by commit
        self._copies: dict[tuple[int, int], Bytes] = {}  # by commit and rank; whole
        self._arriving: dict[tuple[int, int], tuple[Bytes, Handle]] = {}
        self._sending: Handle | None = None
        self._spare: list[Bytes] = []  # memory of commits that do not count any more
        self._members: Members | None = None  # those of the holders
        self._rank = 0
        self._holders: tuple[int | None, ...] = ()
        self._outline: Outline | None = None
        self._sizes: list[int] = []
        self._number = 0  # of the commit that has begun

    @property
    def last(self) -> int:
        """The number of the last commit; 0 if there is none."""
        return max(self._places, default=0)

    def begin(self, value: Any, number: int) -> None:
        """Begin commit `number` of this rank's own `value`: wait until the copies of the former one are whole.

        Every rank calls it. `value` must not change before `keep`.
        """
        self._outline, self._number = Outline(value), number
        self.finish()
        self._follow()
        told = allgather_object((number, self._outline.size_bytes), name="commit of own states")
        if len({at for at, _ in told}) > 1:
            raise StateError(
                f"commit: the ranks are at different commits of their own states, {[at for at, _ in told]} by rank; "
                "want the same number of calls of commit on every rank"
            )
        self._sizes = [size for _, size in told]
        # All ranks have got here, so all copies of the former commit are whole.
        self._forget(lambda commit: commit != self.last)

    def keep(self, *, is_vital: bool) -> None:
        """Copy the value into memory of this rank, and start to send it to the holder of its copy."""
        outline, number, members = self._outline, self._number, self._members
        if outline is None or members is None:
            return
        self._outline = None
        own = self._room(outline.size_bytes)
        outline.copy_into(own)
        self._own[number] = own
        self._places[number] = CommitPlace(members.rank, self._holders, is_vital)
        group = self._group(members)
        for rank, holder in enumerate(self._holders):
            if holder == members.rank:
                size = self._sizes[rank]
                room = self._room(size)
                self._arriving[number, rank] = room, group.recv_async(room[:size], rank)
        holder = self._holders[members.rank]
        if holder is not None:
            self._sending = group.send_async(own[: outline.size_bytes], holder)

    @contextlib.contextmanager
    def declining(self) -> Iterator[None]:
        """Tell the peers, if the block between `begin` and `keep` fails, that this rank has no state of the commit."""
        try:
            yield
        except Exception as error:
            members, self._outline = self._members, None
            if members is not None and not isinstance(error, MultiringError):
                calls = self._group(members).calls
                holder = self._holders[members.rank]
                if holder is not None:
                    calls.decline_message("send", members.rank, holder, 0, error)
                for rank, at in enumerate(self._holders):
                    if at == members.rank:
                        calls.decline_message("recv", rank, members.rank, 0, error)
            raise

    def finish(self) -> None:
        """Wait until this rank's transfers have ended.

        Raises:
            CollectiveError: a rank is lost.
        """
        with internal_errors(_WHAT):
            for key, (room, handle) in list(self._arriving.items()):
                handle.wait()
                del self._arriving[key]
                self._copies[key] = room
            if self._sending is not None:
                self._sending.wait()
                self._sending = None

    def settle(self) -> None:
        """Wait until the transfers of all ranks have ended; every rank calls it."""
        self.finish()
        allgather_object(None, name="end of own states' copies")

    def kept(self) -> Kept:
        """Return what this rank has, after a failure or a change of the ranks.

        Transfers that have not ended are given up; nobody uses their memory again.
        """
        for key, (room, handle) in self._arriving.items():
            with contextlib.suppress(Exception):
                handle.wait(timeout=1.0)
                self._copies[key] = room
        self._arriving.clear()
        self._outline = self._sending = None
        return Kept(dict(self._places), frozenset(self._copies))

    def own_place(self, number: int) -> CommitPlace:
        """Return this rank's place at a commit."""
        return self._places[number]

    def exchanged(self, found: CommitFound, rank: int) -> dict[int, Any]:
        """Return the values of all ranks at a commit, by their rank then; every rank calls it.

        Args:
            found: the commit, and who has whose value.
            rank: this process's rank.
        """
        own = self._places.get(found.number)
        told: dict[int, Bytes] = {}
        for there, source in found.sources.items():
            if source == rank:
                is_own = own is not None and there == own.rank
                told[there] = self._own[found.number] if is_own else self._copies[found.number, there]
        every = allgather_object(told, name="own states")
        return {there: value_in(array) for each in every for there, array in each.items()}

    def own_value(self, number: int) -> Any:
        """Return this rank's own value at a commit."""
        return value_in(self._own[number])

    def prepare(self) -> None:
        """Provide memory for the next commit, so that it need not be found on the way of a step."""
        for array in [*self._own.values(), *self._copies.values()]:
            spare = np.empty_like(array)
            spare.fill(0)
            self._spare.append(spare)

    def drop_others(self, number: int) -> None:
        """Forget all commits but `number`."""
        self._forget(lambda commit: commit != number)

    def _forget(self, is_over: Callable[[int], bool]) -> None:
        for commit in [commit for commit in self._places if is_over(commit)]:
            del self._places[commit]
            self._spare.append(self._own.pop(commit))
        for key in [key for key in self._copies if is_over(key[0])]:
            self._spare.append(self._copies.pop(key))
        # One for this rank's own state, and one for each copy.
        self._spare = sorted(self._spare, key=len)[-1 - self._holders.count(self._rank) :]

    def _room(self, size: int) -> Bytes:
        """Return memory of at least `size` bytes."""
        self._spare.sort(key=len)
        at = next((at for at, array in enumerate(self._spare) if len(array) >= size), None)
        if at is not None:
            return self._spare.pop(at)
        return np.empty(size + size // 16 + _MORE, np.uint8)

    def _follow(self) -> None:
        """Find the holders of the present ranks."""
        members = members_of(global_process_set)
        if self._members is not members:
            self._members, self._rank = members, members.rank
            self._holders = copy_holders(world_now().membership.topology.hosts)

    @staticmethod
    def _group(members: Members) -> Group:
        return members.group.twin_for(_WHAT)

"""The own parts of a state: what `commit` and the synchronisation after a failure do with them."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from multiring._agreement.kept_commits import CommitFound, Kept, LostStatesError, commit_found
from multiring._frontend.checkpoint.last_saved import last_saved
from multiring._frontend.elastic.own import OwnPart, RankChange
from multiring._frontend.elastic.peer_copies import PeerCopies
from multiring.errors import StateError

_log = logging.getLogger("multiring")


class OwnStates:
    """The own parts of one state, with the copies of their last commits.

    Args:
        parts: returns the parts by name; the same names on all ranks.
        saved: returns what the state has saved last: references to it, no copies.
    """

    def __init__(self, parts: Callable[[], Mapping[str, OwnPart]], saved: Callable[[], Any]) -> None:
        self._parts, self._saved = parts, saved
        self._copies = PeerCopies()
        self._records: dict[int, Any] = {}  # by commit, what the state had saved
        self._found: CommitFound | None = None  # to which the ranks go back
        self._is_committing = False
        self._next = 1  # the number of the commit after that; no rank has a commit of this number

    def __bool__(self) -> bool:
        """Return whether there are own parts."""
        return bool(self._parts())

    def commit(self, save: Callable[[], object], number: int | None = None) -> None:
        """Save the state by `save`, and the own parts, as the next commit; every rank calls it.

        If this fails, the former commit stays.
        """
        parts = self._parts()
        values = {name: value for name, part in parts.items() if (value := part.read()) is not None}
        number = self._copies.last + 1 if number is None else number
        self._copies.begin(values, number)
        last = self._copies.last
        self._records = {at: record for at, record in self._records.items() if at == last}
        with self._copies.declining():
            self._is_committing = True
            try:
                save()
            finally:
                self._is_committing = False
            self._records[number] = self._saved()
            self._copies.keep(is_vital=any(parts[name].is_vital for name in values))

    def settle(self) -> None:
        """Wait until all copies of the last commit are whole; every rank calls it."""
        self._copies.settle()

    def kept(self) -> Kept:
        """Return what this rank has; see `decide`."""
        return self._copies.kept()

    def forget(self) -> None:
        """Forget all commits: the state has been saved without own parts."""
        self._copies, self._records, self._found = PeerCopies(), {}, None

    def decide(self, kept: list[Kept], rank: int) -> tuple[int, bool] | None:
        """Decide to which commit the ranks go back, given what each has. All ranks decide alike.

        Returns:
            The rank whose state all take, and whether own parts must be exchanged; None without a commit.

        Raises:
            StateError: the own states of lost ranks are lost with their copies.
        """
        try:
            self._found = found = commit_found(kept)
        except LostStatesError as error:
            raise StateError(f"elastic.run: {error}. {last_saved()}") from None
        numbers = {number for each in kept for number in [*each.own, *(at for at, _ in each.copies)]}
        self._next = max(numbers, default=0) + 1
        if found is None:
            return None
        if found.lost and rank == 0:
            _log.warning(
                "own states of ranks %s at commit %d are lost: the training goes on without", found.lost, found.number
            )
        has_it = [there for there, former in enumerate(found.former) if former is not None]
        is_same = list(found.former) == list(range(len(kept[has_it[0]].own[found.number].holders)))
        is_last = all(max(each.own, default=0) == found.number for each in kept)
        return has_it[0], not (is_same and is_last)

    def former_record(self) -> Any:
        """Return what the state had saved, if the ranks go back to a former commit of this rank; else None."""
        if self._found is None or self._found.number == self._copies.last:
            return None
        return self._records.get(self._found.number)

    def restore(self) -> None:
        """Set this rank's parts to those of its last commit, as long as the ranks have not decided to which they go."""
        number = self._copies.last
        if not number:
            return
        place, values = self._copies.own_place(number), self._copies.own_value(number)
        size = len(place.holders)
        change = RankChange(rank=place.rank, former=tuple(range(size)), former_size=size)
        for name, part in self._parts().items():
            if name in values:
                part.write({place.rank: values[name]}, change)

    @property
    def are_apart(self) -> bool:
        """Whether the own parts need not be in what `save` saves and `sync` sends."""
        return self._is_committing or self._found is not None

    def stay(self) -> None:
        """Forget what was decided: no rank has lost anything, and the ranks are the same."""
        self._found = None

    def take_back(self, save: Callable[[], object], rank: int) -> None:
        """Set the own parts to those of the commit that was decided, and commit anew; every rank calls it.

        Args:
            save: saves the state.
            rank: this process's rank.
        """
        found = self._found
        if found is not None:
            size = len(found.sources) + len(found.lost)
            change = RankChange(rank=rank, former=found.former, former_size=size)
            values = self._copies.exchanged(found, rank)
            for name, part in self._parts().items():
                part.write({there: each[name] for there, each in sorted(values.items()) if name in each}, change)
            self._copies.drop_others(found.number)
        self.commit(save, self._next)
        self._copies.settle()
        self._copies.prepare()
        self._found = None

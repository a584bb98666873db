"""Who keeps whose copy, and to which commit the ranks go back: each rule against all cases of small jobs."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring._agreement.kept_commits import CommitPlace, Kept, LostStatesError, commit_found
from multiring._topology.copies import copy_holders

HOSTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def hosts_of(sizes: list[int], order: list[int]) -> list[list[int]]:
    """Return hosts of so many ranks, whose numbers are in `order`."""
    at, found = 0, []
    for size in sizes:
        found.append(order[at : at + size])
        at += size
    return found


@settings(max_examples=200, deadline=None)
@given(HOSTS, st.randoms(use_true_random=False))
def test_a_copy_is_on_another_host_and_all_keep_alike(sizes: list[int], random: Any) -> None:
    order = list(range(sum(sizes)))
    random.shuffle(order)
    hosts = hosts_of(sizes, order)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    holders = copy_holders(hosts)
    assert holders == copy_holders(hosts)
    if len(order) == 1:
        assert holders == (None,)
        return
    for rank, holder in enumerate(holders):
        assert holder is not None
        assert holder != rank
        assert len(hosts) == 1 or host_of[holder] != host_of[rank]
    most = max(holders.count(rank) for rank in order)
    largest = max(sizes)
    assert most == (1 if len(hosts) == 1 or 2 * largest <= len(order) else -(-largest // (len(order) - largest)))


def test_one_lost_host_loses_nothing() -> None:
    hosts = [[0, 3], [1, 4], [2]]
    holders = copy_holders(hosts)
    for lost in hosts:
        left = [rank for rank in range(5) if rank not in lost]
        kept = [
            Kept(
                {7: CommitPlace(rank, holders, is_vital=True)},
                frozenset((7, of) for of in range(5) if holders[of] == rank),
            )
            for rank in left
        ]
        found = commit_found(kept)
        assert found is not None
        assert found.former == tuple(left)
        assert set(found.sources) == set(range(5))
        assert not found.lost
        for of, source in found.sources.items():
            assert left[source] == (of if of in left else holders[of])


RANKS = 4
RING = copy_holders([list(range(RANKS))])


@pytest.mark.parametrize("kind", ["vital", "other"])
def test_the_former_commit_counts_until_every_copy_is_whole(kind: str) -> None:
    """All losses of 4 ranks, all sets of ranks that have begun commit 8, and of copies of it that are whole."""
    cases = 0
    for number in range(1, RANKS):
        for left in combinations(range(RANKS), number):
            for saved in (set(each) for size in range(RANKS + 1) for each in combinations(range(RANKS), size)):
                for whole in (
                    set(each) for size in range(len(saved) + 1) for each in combinations(sorted(saved), size)
                ):
                    cases += 1
                    check(left, saved, whole, is_vital=kind == "vital")
    assert cases > 1000


def check(left: tuple[int, ...], saved: set[int], whole: set[int], *, is_vital: bool) -> None:
    place = {rank: CommitPlace(rank, RING, is_vital) for rank in range(RANKS)}
    kept = [
        Kept(
            {7: place[rank], **({8: place[rank]} if rank in saved else {})},
            frozenset(
                [(7, of) for of in range(RANKS) if RING[of] == rank] + [(8, of) for of in whole if RING[of] == rank]
            ),
        )
        for rank in left
    ]
    has_new = all(rank in saved for rank in left)
    new = {of for of in range(RANKS) if of in left or (of in whole and RING[of] in left)}
    old = {of for of in range(RANKS) if of in left or RING[of] in left}
    if has_new and (len(new) == RANKS or not is_vital):
        number, there = 8, new
    elif len(old) == RANKS or not is_vital:
        number, there = 7, old
    else:
        with pytest.raises(LostStatesError) as told:
            commit_found(kept)
        assert all(
            (f"of rank {rank} (copy on rank {RING[rank]})" in str(told.value))
            == (rank not in (new if has_new else old))
            for rank in range(RANKS)
        )
        return
    found = commit_found(kept)
    assert found is not None
    assert (found.number, set(found.sources)) == (number, there)
    assert found.lost == tuple(sorted(set(range(RANKS)) - there))
    for of, source in found.sources.items():
        assert left[source] == (of if of in left else RING[of])


def test_who_came_in_later_does_not_matter() -> None:
    place = CommitPlace(0, (1, 0), is_vital=True)
    newer = CommitPlace(1, (1, 2, 0), is_vital=True)
    survivor = Kept({3: place, 4: CommitPlace(0, (1, 2, 0), is_vital=True)}, frozenset({(3, 1)}))
    newcomer = Kept({4: newer}, frozenset())
    assert commit_found([Kept({}, frozenset())]) is None
    found = commit_found([survivor, newcomer, Kept({}, frozenset())])  # of commit 4, rank 2's state is lost
    assert found is not None
    assert (found.number, found.former, dict(found.sources)) == (3, (0, None, None), {0: 0, 1: 0})

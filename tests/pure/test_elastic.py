"""Recovery after a failure: what is kept, what is rolled back, and the order of the steps."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

from multiring._frontend.elastic.state import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    run_fn,
)
from multiring._frontend.elastic.values_state import ValuesState
from multiring._frontend.errors import HorovodInternalError
from multiring.errors import MismatchError, PeerLostError, RendezvousError


class Noted(State):
    """A state that records the calls it gets."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0)
        self.notes: list[str] = []

    def save(self) -> None:
        self.notes.append("save")

    def restore(self) -> None:
        self.notes.append("restore")

    def sync(self) -> None:
        self.notes.append("sync")

    def reset(self) -> None:
        self.notes.append("fit")


def steps(state: Noted, *outcomes: Exception | str) -> Callable[..., str]:
    """Return a wrapped function that raises or returns the next outcome at each call."""
    left = list(outcomes)

    def train(found: State, word: str, *, end: str) -> str:
        assert found is state
        state.notes.append(word)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome + end

    return run_fn(train, lambda: state.notes.append("reset"))


def test_what_happens_when() -> None:
    state = Noted()
    state.register_reset_callbacks([lambda: state.notes.append("first"), lambda: state.notes.append("second")])
    train = steps(
        state,
        HorovodInternalError(),
        HostsUpdatedInterrupt(skip_sync=False),
        HostsUpdatedInterrupt(skip_sync=True),
        "done",
    )
    assert train.__name__ == "train"
    assert train(state, "train", end=".") == "done."
    again = ["fit", "first", "second"]
    assert state.notes == [
        *("sync", "train", "reset", "restore", *again),  # after the reset, no failed operation still writes
        *("sync", "train", "reset", *again),
        *("sync", "train", "reset", *again),
        "train",
    ]


def test_what_cannot_meet_anew_is_where_it_was_committed() -> None:
    def fail() -> None:
        raise RendezvousError("rank 1 did not come")

    def train(_: State) -> None:
        raise HorovodInternalError

    state = Noted()
    with pytest.raises(RendezvousError, match="rank 1"):
        run_fn(train, fail)(state)
    assert state.notes == ["sync", "restore"]


def test_a_rank_that_is_lost_while_all_join_again_is_a_failure_like_any_other() -> None:
    state, left = Noted(), [PeerLostError("rank 1 died"), HorovodInternalError("no sum"), None]

    def reset() -> None:
        state.notes.append("reset")
        if (error := left.pop(0)) is not None:
            raise error

    def train(state: Noted) -> str:
        state.notes.append("train")
        if state.notes.count("train") == 1:
            raise HostsUpdatedInterrupt(skip_sync=True)
        return "done"

    assert run_fn(train, reset)(state) == "done"
    assert state.notes == ["sync", "train", "reset", "reset", "restore", "reset", "restore", "fit", "sync", "train"]
    # A callback whose ranks differ would fail again.
    left[:] = [None]
    state.register_reset_callbacks([lambda: (_ for _ in ()).throw(MismatchError("differ"))])
    with pytest.raises(MismatchError, match="differ"):
        steps(state, PeerLostError("gone"), "done")(state, "train", end="")
    left[:] = [PeerLostError(f"loss {number}") for number in range(20)]
    with pytest.raises(PeerLostError, match="loss 9"):
        run_fn(lambda _: (_ for _ in ()).throw(HostsUpdatedInterrupt(skip_sync=False)), reset)(Noted())


def test_errors_of_multiring_itself() -> None:
    state = Noted()
    assert steps(state, PeerLostError("gone"), "done")(state, "train", end="") == "done"
    assert state.notes.count("restore") == 1
    with pytest.raises(MismatchError):  # the Group is still usable, so a reset would not help
        steps(state, MismatchError("differ"))(state, "train", end="")
    with pytest.raises(ZeroDivisionError):
        steps(state, ZeroDivisionError())(state, "train", end="")


def test_what_fails_for_ever_ends() -> None:
    state = Noted()
    train = steps(state, *[HorovodInternalError(str(i)) for i in range(11)])
    with pytest.raises(HorovodInternalError, match="9"):
        train(state, "train", end="")

    def commit_now_and_then(state: Noted) -> str:
        state.notes.append("train")
        count = state.notes.count("train")
        if count % 7 == 0:
            state.commit()
        if count < 30:
            raise HorovodInternalError
        return "done"

    state.notes.clear()
    assert run_fn(commit_now_and_then, lambda: None)(state) == "done"


def test_any_object_can_be_a_state() -> None:
    class Own:
        calls = 0

        def sync(self) -> None:
            self.calls += 1

    own = Own()
    assert run_fn(lambda state: state.calls, lambda: None)(own) == 1


class Job:
    """Ranks, played by threads, that exchange objects."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._told: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=240)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        found = copy.deepcopy(self._told)  # a copy, as for objects sent between processes
        self._barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.ranks

        def call(rank: int) -> None:
            found[rank] = function(rank)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def state(self, rank: int, **kwargs: Any) -> ObjectState:
        return ObjectState(
            lambda value: self.gather(rank, value)[0], lambda: rank, lambda value: self.gather(rank, value), **kwargs
        )


def interrupt_of(state: State) -> bool | None:
    """Return `skip_sync` of the interrupt if the hosts changed, else None."""
    try:
        state.check_host_updates()
    except HostsUpdatedInterrupt as interrupt:
        return interrupt.skip_sync
    return None


def test_what_one_rank_hears_all_do() -> None:
    job = Job(3)

    def check(rank: int) -> list[bool | None]:
        state = job.state(rank)
        found = [interrupt_of(state)]
        if rank == 2:
            state.on_hosts_updated(5.0, HostUpdateResult.removed)
        found += [interrupt_of(state), interrupt_of(state)]
        # Rank 0 learns of a removed host and another rank of an added host, so a new rank may need a sync.
        if rank < 2:
            state.on_hosts_updated(6.0 + rank, HostUpdateResult.removed if rank == 0 else HostUpdateResult.added)
        found += [interrupt_of(state)]
        if rank == 1:
            state.on_hosts_updated(5.0, HostUpdateResult.added)  # an older event
        return [*found, interrupt_of(state)]

    assert job.run(check) == [[None, True, None, False, None]] * 3


def test_one_that_is_new_makes_all_synchronise() -> None:
    job = Job(2)
    assert job.run(lambda rank: job.state(rank).must_sync(wanted=rank == 1)) == [True, True]
    assert job.run(lambda rank: job.state(rank).must_sync(wanted=False)) == [False, False]


def test_without_a_gather_rank_0_is_believed() -> None:
    state = State(lambda value: value, lambda: 0)
    assert interrupt_of(state) is None
    state.on_hosts_updated(1.0, HostUpdateResult.mixed)
    assert interrupt_of(state) is False
    assert interrupt_of(state) is None
    state.on_hosts_updated(2.0, HostUpdateResult.mixed)
    state.on_reset()  # a new rendezvous has happened since
    assert interrupt_of(state) is None


def test_objects_are_kept() -> None:
    job = Job(2)

    def check(rank: int) -> tuple[Any, ...]:
        mine = [rank]
        state: Any = job.state(rank, batch=20 + rank, seen=mine)
        assert state.seen is mine
        state.sync()
        found = [state.batch, list(state.seen)]
        state.batch = 7
        state.seen.append(1)
        state.restore()
        found += [state.batch, list(state.seen)]
        state.batch = 8
        state.seen.append(2)
        state.commit()
        for _ in range(2):
            state.batch += 1
            state.seen.append(3)
            state.restore()
        return (*found, state.batch, state.seen)

    assert job.run(check) == [(20, [0], 20, [0], 8, [0, 2])] * 2


def test_a_sync_without_run_compares_the_parts_first() -> None:
    """The broadcast would set the attributes of rank 0 on every rank, and leave those that only a rank has."""
    job = Job(2)

    def check(rank: int) -> tuple[Any, ...]:
        state: Any = job.state(rank, **{"epoch" if rank else "batch": rank})
        with pytest.raises(MismatchError, match="rank 0: attribute 'batch'; rank 1: attribute 'epoch'"):
            state.sync()
        alike: Any = job.state(rank, **({} if rank else {"batch": 1}))
        with pytest.raises(MismatchError, match="rank 0: attribute 'batch'; rank 1: nothing more"):
            alike.sync()
        return hasattr(state, "epoch"), hasattr(state, "batch"), hasattr(alike, "batch")

    assert job.run(check) == [(False, True, True), (True, False, False)]


def test_a_commit_looks_for_hosts() -> None:
    state: Any = ObjectState(lambda value: value, lambda: 0, batch=1)
    state.batch = 2
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt, match="the hosts changed"):
        state.commit()
    state.batch = 3
    state.restore()
    assert state.batch == 2


def test_a_plain_state_says_nothing_of_itself() -> None:
    state = State(lambda value: value, lambda: 0)
    for call in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            call()


class NetState(ValuesState):
    """A net with one weight. Its broadcast fails if `other` is None."""

    def __init__(self, weight: int, other: int | None, **kwargs: Any) -> None:
        self.net = {"weight": weight}
        self.other = other
        super().__init__(**kwargs)

    def _read(self) -> dict[str, int]:
        return dict(self.net)

    def _write(self, values: dict[str, int]) -> None:
        self.net.update(values)

    def _share(self) -> dict[str, int]:
        if self.other is None:
            raise PeerLostError("rank 1 left the job")
        self.net["weight"] = self.other
        return dict(self.net)


def test_a_commit_that_fails_half_way_keeps_neither_half() -> None:
    state: Any = NetState(1, None, epoch=0)
    state.net["weight"], state.epoch = 2, threading.Lock()  # locks cannot be copied
    with pytest.raises(TypeError, match="lock"):
        state.commit()
    state.restore()
    assert (state.net["weight"], state.epoch) == (1, 0)


def test_a_synchronisation_that_fails_leaves_the_commit_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = NetState(1, 5, epoch=0)
    state.save()

    def lost(_: object) -> object:
        raise PeerLostError("rank 1 left the job")

    monkeypatch.setattr(state, "_gather_object", lambda own: [own])
    monkeypatch.setattr(state, "_bcast_object", lost)  # at this point the values have been broadcast
    with pytest.raises(PeerLostError):
        state.sync()
    state.restore()
    assert (state.net["weight"], state.epoch) == (1, 0)
    state.other = None
    with pytest.raises(PeerLostError):
        state.sync()
    state.restore()
    assert (state.net["weight"], state.epoch) == (1, 0)

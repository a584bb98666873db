"""Training that resumes after failures: the same result, and each sample once."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.faults import kill
from tests.support.plain import backward, enter, loss_of, network, samples
from tests.support.ranks import Here, report_of, run_ranks
from tests.support.sharing import kept
from torch import Tensor, nn

import multiring.torch as mt
from multiring._frontend.elastic.state import HostsUpdatedInterrupt, HostUpdateResult
from multiring.errors import RendezvousError
from multiring.torch.elastic.state import StateHandler

SAMPLES, EPOCHS, BATCH = 18, 2, 2


class Failing:
    """Raises HorovodInternalError on rank 1, once at each of the given steps."""

    def __init__(self, here: Here, steps: list[int]) -> None:
        self._left = steps if here.rank == 1 else []
        self._step = 0

    def come_by(self) -> None:
        self._step += 1
        if self._left and self._step == self._left[0]:
            self._left = self._left[1:]
            raise mt.HorovodInternalError("the test says so")


def loss_on(model: nn.Module, indices: list[int]) -> Tensor:
    images, labels = samples(5, SAMPLES)
    loss: Tensor = nn.functional.cross_entropy(model(images[indices]), labels[indices])
    return loss


def train(here: Here, failures: list[int], *, one_by_one: bool = False, news_at: int | None = None) -> tuple[Any, Any]:
    """Train; return the parameters, and how often each epoch committed each sample."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept.append(optimizer)
    optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = mt.elastic.ElasticSampler(range(SAMPLES), seed=2)
    state: Any = mt.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0, seen=[])
    failing = Failing(here, failures)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(mt.size())])

    @mt.elastic.run
    def go(state: Any) -> str:
        while state.epoch < EPOCHS:
            for batch in range(-(-len(state.sampler) // BATCH)):
                indices = state.sampler.get_indices(batch, BATCH)
                state.optimizer.zero_grad()
                loss = loss_on(state.model, indices)
                failing.come_by()
                backward(loss)
                state.optimizer.step()
                state.step += 1
                if one_by_one:
                    state.sampler.record_indices(indices)
                else:
                    state.sampler.record_batch(batch, len(indices))
                state.seen += [(state.epoch, index) for each in mt.allgather_object(indices) for index in each]
                if state.step == news_at and here.rank == 1:
                    state.on_hosts_updated(1.0, HostUpdateResult.removed)
                if state.step % 2 == 0:
                    state.commit()
            state.epoch += 1
            state.scheduler.step()
            state.sampler.set_epoch(state.epoch)
            state.commit()
        return "done"

    assert go(state) == "done"
    assert resets == [here.size] * (len(failures) + (news_at is not None))
    return [parameter.detach().clone() for parameter in model.parameters()], Counter(state.seen)


def test_failures_change_nothing() -> None:
    run_ranks(fail_and_go_on, 2)


def fail_and_go_on(here: Here) -> None:
    enter()
    wanted, seen = train(here, [])
    assert {index for _, index in seen} == set(range(SAMPLES))
    found, seen_again = train(here, [1, 4, 5, 9])
    assert seen_again == seen
    # After a failure, the rest of the epoch is dealt again to the same number of ranks, in the same batches.
    for after, before in zip(found, wanted, strict=True):
        assert torch.allclose(after, before, rtol=1e-9, atol=1e-12)
    for each in found:
        assert torch.equal(mt.allreduce(each, op=mt.Min), mt.allreduce(each, op=mt.Max))
    _, seen_one_by_one = train(here, [3, 4], one_by_one=True, news_at=6)
    assert set(seen_one_by_one) == set(seen)
    assert seen_one_by_one.total() <= seen.total() + EPOCHS


def test_a_commit_that_fails_keeps_nothing() -> None:
    run_ranks(fail_to_commit, 1)


def fail_to_commit(_: Here) -> None:
    enter()
    model = nn.Linear(1, 1).requires_grad_(False)
    state: Any = mt.elastic.TorchState(model=model, epoch=0)
    model.weight.fill_(1.0)
    state.commit()
    model.weight.fill_(2.0)
    state.epoch = threading.Lock()  # locks cannot be copied
    with pytest.raises(TypeError, match="lock"):
        state.commit()
    state.restore()
    assert (float(model.weight), state.epoch) == (1.0, 0)


def test_states_on_several_ranks() -> None:
    run_ranks(keep_states, 2)


def keep_states(here: Here) -> None:  # noqa: PLR0915 -- one job for all checks
    enter()
    model, other = network(seed=here.rank), network(seed=7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + here.rank))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + here.rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + here.rank))
    sampler = mt.elastic.ElasticSampler(range(16), shuffle=False)
    if here.rank == 0:  # the other ranks have no optimizer state yet
        backward(loss_of(model, 0))
        optimizer.step()
    state: Any = mt.elastic.TorchState(
        model, optimizer, scheduler=scheduler, scaler=scaler, sampler=sampler, batch=20 + here.rank, notes=[here.rank]
    )
    assert state.model is model
    assert state.sampler is sampler
    state.sync()
    first = [parameter.detach().clone() for parameter in model.parameters()]
    assert (state.batch, state.notes, scheduler.step_size, scaler.get_scale()) == (20, [0], 1, 4.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    for parameter in model.parameters():
        assert torch.equal(mt.allreduce(parameter.detach(), op=mt.Min), mt.allreduce(parameter.detach(), op=mt.Max))

    for _ in range(2):  # restored values are copies, so a second restore works, too
        backward(loss_of(model, 1))
        optimizer.step()
        scheduler.step()
        state.batch, state.notes = 21, [*state.notes, 5]
        sampler.record_batch(0, 2)
        assert sampler.processed_num == 4
        state.restore()
        assert (state.batch, state.notes, sampler.processed_num) == (20, [0], 0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
        for parameter, wanted in zip(model.parameters(), first, strict=True):
            assert torch.equal(parameter, wanted)

    model.load_state_dict(other.state_dict())
    state.batch = 22
    sampler.record_batch(0, 3)
    state.commit()
    state.batch = 23
    state.restore()
    assert (state.batch, sampler.processed_num, len(sampler)) == (22, 6, 5)
    for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
    # From now on the state keeps another object under the same name.
    state.model = network(seed=3)
    state.model.load_state_dict(other.state_dict())
    state.restore()
    assert torch.equal(next(state.model.parameters()), next(network(seed=3).parameters()))

    sampler.record_indices([10 + here.rank])
    state.commit()
    state.sync()
    done = {name: value for name, value in sampler.state_dict().items() if name != "order"}
    assert done == {"epoch": 0, "processed_num": 6, "processed_indices": [10, 11]}
    assert len(sampler) == 4
    if here.rank == 1:
        state.on_hosts_updated(3.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


class Clock:
    def __init__(self) -> None:
        self.ticks = 0


class ClockHandler(StateHandler):
    def __init__(self, value: Clock) -> None:
        super().__init__(value)
        self._ticks = value.ticks

    def save(self) -> None:
        self._ticks = self.value.ticks

    def restore(self) -> None:
        self.value.ticks = self._ticks

    def sync(self) -> None:
        self.value.ticks = 100
        self.save()


def test_handlers_of_others() -> None:
    before = mt.elastic.get_handler_registry()
    clock = Clock()
    mt.elastic.set_handler_registry([*before, (Clock, ClockHandler)])
    try:
        state: Any = mt.elastic.TorchState(clock=clock)
        assert state.model is None
        clock.ticks = 5
        state.save()
        clock.ticks = 6
        state.restore()
        assert state.clock is clock
        assert clock.ticks == 5
    finally:
        mt.elastic.set_handler_registry(before)
    assert mt.elastic.get_handler_registry() is before
    plain = StateHandler(clock)
    for call in (plain.save, plain.restore, plain.sync):
        with pytest.raises(NotImplementedError):
            call()


def test_process_sets_come_back() -> None:
    run_ranks(meet_again, 3)


def meet_again(here: Here) -> None:
    for are_dynamic in (False, True):
        pair = mt.ProcessSet([0, 2])
        enter(process_sets="dynamic" if are_dynamic else [pair])
        if are_dynamic:
            mt.add_process_set(pair)
        failures = [here.rank == 1]

        @mt.elastic.run
        def go(_state: Any, word: str, failures: list[bool] = failures, pair: mt.ProcessSet = pair) -> str:
            if failures and failures.pop():
                raise mt.HorovodInternalError("the test says so")
            mt.barrier()
            total = mt.allreduce(torch.ones(1), op=mt.Sum, process_set=pair).item() if pair.included() else None
            return f"{word} {total}"

        wanted = "sum None" if here.rank == 1 else "sum 2.0"
        assert go(mt.elastic.TorchState(), "sum") == wanted
        assert mt.is_initialized()
        if are_dynamic:
            assert mt.remove_process_set(pair)
        mt.shutdown()


def test_a_rank_that_is_gone_for_good_ends_the_job() -> None:
    report = report_of(train_until_death, 2, faults=[kill(1).at("training")], init_timeout_s=4.0)
    assert isinstance(report.outcomes[0].error, RendezvousError)


def train_until_death(here: Here) -> None:
    enter()

    @mt.elastic.run
    def go(_state: Any) -> None:
        here.reach("training")
        while True:
            mt.allreduce(torch.ones(1))

    go(mt.elastic.TorchState())

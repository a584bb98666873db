"""Horovod's contract of DistributedOptimizer: methods, errors and their texts."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import expect, expect_same_parameters, sgd
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError
from multiring.torch.gradients.optimizer import share_anew

NOT_SKIPPED = "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()"
TOO_EARLY = r"optimizer\.zero_grad\(\) was called after loss\.backward\(\) but before optimizer\.step\(\)"
TOO_MANY = "Gradients were computed more than backward_passes_per_step times before call"


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def first_of(model: nn.Module) -> Any:
    return next(model.parameters())


def test_contract_of_horovods_optimizer() -> None:
    run_ranks(keep_contract, 2)


def keep_contract(here: Here) -> None:
    join(here)
    for check in (
        warn_once,
        refuse_early_zero,
        refuse_more_backwards,
        change_passes,
        refuse_options,
        leave_scaled_step,
    ):
        check(here)
    for check in (derive_classes, stay_outside, translate, leave_other_types, differ_in_groups, share_in_another_job):
        check(here)


def warn_once(here: Here) -> None:
    model = network()
    optimizer = sgd(model)
    backward(loss_of(model, here.rank))
    optimizer.synchronize()
    (text,) = warnings_of(optimizer.step)
    assert text.startswith(NOT_SKIPPED)
    assert warnings_of(optimizer.step) == []
    for wants_context in (True, False):
        optimizer.zero_grad()
        backward(loss_of(model, here.rank))
        if wants_context:
            optimizer.synchronize()
            first_of(model).grad.zero_()
            before = first_of(model).detach().clone()
            with optimizer.skip_synchronize():
                assert warnings_of(optimizer.step) == []
            assert torch.equal(first_of(model), before)  # the zeroed gradients were not reduced again
        else:
            assert warnings_of(optimizer.step) == []
    # A call of synchronize without a step does not affect later steps.
    optimizer.synchronize()
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    assert warnings_of(optimizer.step) == []
    expect_same_parameters(model)


def refuse_early_zero(here: Here) -> None:
    model = network()
    optimizer = sgd(model)
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    with pytest.raises(AssertionError, match=TOO_EARLY):
        optimizer.zero_grad()
    expect(model, [0, 1])
    optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    optimizer.synchronize()
    optimizer.zero_grad()
    # The same holds before any gradient was reduced.
    optimizer.set_backward_passes_per_step(2)
    backward(loss_of(model, here.rank))
    with pytest.raises(AssertionError, match=TOO_EARLY):
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())  # as after a return to a checkpoint
    optimizer.zero_grad()
    expect_same_parameters(model)


def refuse_more_backwards(here: Here) -> None:
    model = network()
    optimizer = sgd(model)
    backward(loss_of(model, here.rank))
    with pytest.raises(AssertionError, match=TOO_MANY):
        backward(loss_of(model, here.rank))
    optimizer.step()
    expect_same_parameters(model)
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    optimizer.step()
    expect_same_parameters(model)


def change_passes(here: Here) -> None:
    model = network()
    optimizer = sgd(model)
    optimizer.set_backward_passes_per_step(2)
    for seed in (0, 10):
        backward(loss_of(model, here.rank + seed))
    expect(model, [0, 1, 10, 11], scale=2.0)
    with pytest.raises(AssertionError, match=TOO_MANY):
        backward(loss_of(model, here.rank))
    for passes in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"backward_passes_per_step={passes}"):
            optimizer.set_backward_passes_per_step(passes)


def refuse_options(_: Here) -> None:
    model = network()
    weight, bias = model[0].weight, model[0].bias
    named = list(model.named_parameters())
    unlisted: Any = model
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"named_parameters": [*named, *named]}, "2 times"),
        ({"named_parameters": named[1:]}, r"named_parameters lacks the optimizer's param_groups\[0\]"),
        ({"named_parameters": list(model.parameters())}, "named_parameters has a Parameter; want"),
        ({"gradient_predivide_factor": 2.0, "op": mt.Sum}, "not supported with op != Average"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0: want a number above 0"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"groups": 0}, "groups=0: want"),
        ({"groups": -1}, "groups=-1: want"),
        ({"groups": "all"}, "groups='all': want"),
        ({"groups": [weight]}, "want a number"),
        ({"groups": [["weight"]]}, "groups has a str; want parameters"),
        ({"groups": [[weight], [bias, weight]]}, "groups has a parameter twice"),
        ({"op": mt.Min}, "op='min': want one of average, sum, adasum"),
        ({"op": 7}, "op=7"),
        ({"process_set": [0, 1]}, r"process_set=\[0, 1\]: want a ProcessSet"),
        ({"compression": unlisted}, "want Compression.none"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            mt.DistributedOptimizer(torch.optim.SGD(model.parameters()), **options)
    optimizer = torch.optim.SGD(model.parameters())
    (old,) = warnings_of(lambda: mt.DistributedOptimizer(optimizer, num_groups=2))
    assert "num_groups" in old
    with pytest.raises(ValueError, match="groups=-1"), pytest.warns(DeprecationWarning, match="num_groups"):
        mt.DistributedOptimizer(optimizer, num_groups=-1)


def leave_scaled_step(here: Here) -> None:
    """A scaler skips steps, first without and then with zeroed gradients."""
    for kind in ({}, {"fused": True}):
        model = network(torch.float32)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, **kind)
        mt.DistributedOptimizer(optimizer, model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = first_of(model).detach().clone()
        for zeroes in (False, True, True):
            backward(scaler.scale(loss_of(model, here.rank)) * (float("inf") if here.rank else 1.0))
            scaler.step(optimizer)
            scaler.update()
            if zeroes:
                optimizer.zero_grad()
        assert torch.equal(before, first_of(model))
        backward(scaler.scale(loss_of(model, here.rank)))
        scaler.step(optimizer)
        assert not torch.equal(before, first_of(model))
        expect_same_parameters(model)


def derive_classes(here: Here) -> None:
    """A class derived from a distributed optimizer's class makes plain optimizers.

    They stay plain until they are distributed.
    """
    distributed = sgd(network())
    base: Any = type(distributed)
    steps = []

    class Counting(base):  # type: ignore[misc] # made at run time
        def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
            steps.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model = network()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    optimizer.zero_grad()
    optimizer.synchronize()
    backward(loss_of(model, 5))
    optimizer.step()
    mt.DistributedOptimizer(optimizer, op=mt.Sum)
    assert type(optimizer) is Counting
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    optimizer.step()  # calls the base's step, which must not reduce gradients again
    expect_same_parameters(model)
    optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, here.rank)
        backward(loss)
        return loss

    optimizer.step(closure)
    expect_same_parameters(model)
    assert steps == [0.1] * 3
    assert type(copy.deepcopy(optimizer)) is Counting
    assert type(pickle.loads(pickle.dumps(distributed))) is torch.optim.SGD  # noqa: S301 -- the test's data


def stay_outside(here: Here) -> None:
    """A rank outside the optimizer's process set trains alone."""
    multiring.shutdown()
    alone = mt.ProcessSet([0])
    mt.init(process_sets=[alone])
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), process_set=alone)
    for _ in range(2):
        backward(loss_of(model, here.rank))
        optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    expect(model, [here.rank])
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert mt.gradient_bytes(optimizer) == 0
    unknown = mt.ProcessSet([1])
    with pytest.raises(ValueError, match="not known"):
        mt.DistributedOptimizer(optimizer, process_set=unknown)


class Halved:
    """A user's own compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return (tensor * 2).to(context)


def translate(here: Here) -> None:
    model = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has no type for it
    optimizer = sgd(model, compression=Halved, bucket_bytes=500)
    for _ in range(2):
        backward(loss_of(model, here.rank))
        expect(model, [0, 1])
        assert mt.gradient_bytes(optimizer) > sum(each.nbytes for each in model.parameters())
        optimizer.synchronize()
        optimizer.zero_grad()


def leave_other_types(here: Here) -> None:
    """Only float32 is compressed between hosts; other types are sent unchanged."""
    model = network(torch.float64)
    sgd(model, compression=mt.Compression.fp16)
    backward(loss_of(model, here.rank))
    expect(model, [0, 1])


def differ_in_groups(here: Here) -> None:
    model = network()
    layers = [list(layer.parameters()) for layer in model]
    with pytest.raises(MismatchError, match=r"rank 0: groups=\[\[0, 1\], .*; rank 1: groups="):
        sgd(model, groups=layers[::-1] if here.rank else layers)
    multiring.drain_events()
    sgd(model, groups=[layers[0], layers[2] + layers[5]])
    multiring.drain_events()
    backward(loss_of(model, here.rank))
    expect(model, [0, 1])
    names = [event.name for event in multiring.drain_events() if event.kind == "operation"]
    assert [name for name in names if name != "agreement"] == ["all_reduce"] * 3  # NCCL needs agreements, too


def share_in_another_job(here: Here) -> None:
    model = network()
    optimizer = sgd(model)
    backward(loss_of(model, here.rank))
    multiring.shutdown()
    multiring.init()
    optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))  # a gradient of the next job
    optimizer.step()
    expect_same_parameters(model)
    share_anew(optimizer)
    assert first_of(model).grad is None
    backward(loss_of(model, here.rank))
    optimizer.step()
    expect_same_parameters(model)
    share_anew(torch.optim.SGD(model.parameters()))  # a plain optimizer shares nothing


def test_names_are_checked_before_init() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
    named = [*first.named_parameters(), *second.named_parameters()]
    with pytest.raises(ArgumentError, match="weight 2 times"):
        mt.DistributedOptimizer(optimizer, named)


# ---- process sets ----


def test_a_process_set_shares_alone() -> None:
    run_ranks(train_in_sets, 3)


def train_in_sets(here: Here) -> None:
    join(here)
    multiring.shutdown()
    both, one = mt.ProcessSet([0, 2]), mt.ProcessSet([1])
    mt.init(process_sets=[both, one])
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), process_set=one if here.rank == 1 else both)
    for _ in range(3 if here.rank == 1 else 2):
        backward(loss_of(model, here.rank))
        expect(model, [1] if here.rank == 1 else [0, 2])
        optimizer.synchronize()
        optimizer.zero_grad()

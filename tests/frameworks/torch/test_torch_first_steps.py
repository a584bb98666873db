"""First optimizer steps: errors for different models, warnings for equal samples."""

import warnings
from typing import Any

import numpy as np
import torch
from tests.support.plain import backward, enter
from tests.support.ranks import Here, run_ranks
from torch import nn

import multiring
import multiring.torch as mt
from multiring._frontend.first_steps import _ROUNDING, UNKNOWN, FirstSteps, _distance, digest_of
from multiring.errors import MismatchError


def step_on(
    model: nn.Module, rank: int, steps: int, *, same: bool = False, between: Any = None, **options: Any
) -> list[str]:
    """Train `model` for `steps` steps; return the texts of the warnings."""
    lag = options.pop("lag", False)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options)
    if lag:
        mt.gradient_lag(optimizer)
    vars(model)["optimizer"] = optimizer  # keeps the optimizer as long as the model
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(7 * step + (0 if same else 100 * rank))
            backward(model(torch.randn(4, 3, generator=generator)).square().mean())
            optimizer.step()
            if between is not None:
                between(step)
    return [str(each.message) for each in seen]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"op": mt.Sum},
    {"op": mt.Adasum},
    {"compression": mt.Compression.bf16},
    {"compression": mt.PowerSGD(rank=1)},
    {"backward_passes_per_step": 2},
    {"lag": True},
]


def be_told(here: Here) -> list[list[str]]:
    enter()
    told: list[list[str]] = []
    for options in OPTIONS:
        # The ranks' models differ from the start.
        try:
            step_on(network(here.rank), here.rank, 4, **options)
            told.append([f"nothing for {options}"])
        except MismatchError as error:
            told.append([str(error)])
        # One tensor of one rank differs slightly.
        model = network(0)
        if here.rank == 1:
            with torch.no_grad():
                model.get_parameter("2.bias")[1] += 1e-4
        try:
            step_on(model, here.rank, 4, **options)
            told.append([f"nothing for {options}, in one element"])
        except MismatchError as error:
            told.append([str(error), "a bias" if "2.bias" in str(error) else "another"])
        # A broadcast comes after the first step, as in Horovod's callbacks, or before it.
        late = network(here.rank)

        def give(step: int, late: nn.Module = late) -> None:
            if step == 0:
                mt.broadcast_parameters(late, root_rank=0)

        step_on(late, here.rank, 4, between=give, **options)
        step_on(network(0), here.rank, 4, **options)
    return told


def test_ranks_of_different_models_are_told_before_the_second_step() -> None:
    for told in run_ranks(be_told, 2):
        assert len(told) == 2 * len(OPTIONS)
        for each in told:
            assert "before the second step the ranks have different values of parameter" in each[0], each
            assert "MULTIRING_CHECK_FIRST_STEPS=0" in each[0]
            assert each[1:] in ([], ["a bias"]), each


def be_warned(here: Here) -> list[list[str]]:
    enter()
    found = [step_on(network(0), here.rank, 2)]
    found += [step_on(network(0), here.rank, 2, same=True), step_on(network(0), here.rank, 2, same=True)]
    # With the setting off there is no warning about equal samples and no error about different models.
    mt.shutdown()
    multiring.init(check_first_steps=False)
    found.append(step_on(network(here.rank), here.rank, 3, same=True))
    return found


def test_equal_gradients_are_warned_of_once() -> None:
    first, *others = run_ranks(be_warned, 3)
    assert [len(each) for each in first] == [0, 1, 0, 0], first
    assert "all 3 ranks have the same gradients" in first[1][0]
    assert others == [[[], [], [], []]] * 2


def drop_what_distribute_returns(_here: Here) -> list[str]:
    enter()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.arange(16.0).view(8, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    mt.distribute(model, optimizer, loader)  # the script drops the results
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for (batch,) in loader:
            optimizer.zero_grad()
            backward(model(batch).square().mean())
            optimizer.step()
    return [str(each.message) for each in seen]


def test_a_loader_that_stays_whole_is_warned_of() -> None:
    first, second = run_ranks(drop_what_distribute_returns, 2)
    assert len(first) == 1
    assert "the loader that distribute returns" in first[0]
    assert not second


def end_early(here: Here) -> None:
    """A rank that joins before the first or second step does not delay the others."""
    enter()
    for steps in (0, 1, 2):
        model = network(0)
        step_on(model, here.rank, steps if here.rank == 1 else 3)
        mt.join()


def test_a_rank_that_has_joined_takes_part() -> None:
    run_ranks(end_early, 3)


def test_fingerprints_are_of_all_that_a_parameter_is() -> None:
    """Each change of content, type or shape changes the fingerprint."""
    random = np.random.default_rng(0)
    for kind in ("f2", "f4", "f8", "i4", "u1", "?"):
        array = random.integers(0, 2, (3, 4)).astype(kind)
        seen = {
            digest_of(array),
            digest_of(array.reshape(4, 3)),
            digest_of(array.astype("f8" if kind != "f8" else "f4")),
        }
        for place in np.ndindex(array.shape):
            other = array.copy()
            other[place] = not other[place]
            seen.add(digest_of(other))
        assert len(seen) == 3 + array.size
        assert UNKNOWN not in seen
        assert digest_of(np.asfortranarray(array)) == digest_of(array)


def test_rounding_is_no_difference() -> None:
    a = np.linspace(-1, 1, 101, dtype=np.float32)
    assert _distance(a, a.copy()) == 0
    assert _distance(a, np.nextafter(a, np.float32(2))) <= _ROUNDING
    assert _distance(a, a * np.float32(1.001)) > _ROUNDING
    assert _distance(np.arange(3), np.arange(1, 4)) > _ROUNDING
    assert _distance(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) > _ROUNDING
    assert _distance(np.zeros(2), np.array([0.0, 1e-30])) > _ROUNDING


def look_once(here: Here) -> list[bool]:
    group = here.join()
    first = FirstSteps("a test", group, ["a"], lambda: [np.zeros(2)])
    wanted = [first.wants]
    first.told()
    wanted.append(first.wants)
    first.step()
    wanted.append(first.wants)
    first.meet(first.told())
    return [*wanted, first.wants]


def test_a_comparison_is_made_once() -> None:
    assert run_ranks(look_once, 2) == [[True, False, True, False]] * 2

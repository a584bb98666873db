"""A training script of torch for all ranks is an objective without changes, on trials of 1 and 2 ranks side by side."""

from typing import Any

import optuna
import pytest
import torch
from tests.support.ranks import Here, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring import trials
from multiring.trials.trial import outcome_of_value


def objective(trial: trials.Trial) -> float:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=trial.params["rate"])
    inputs = torch.randn(48, 4)
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model, optimizer, loader = mt.distribute(model, optimizer, loader)
    assert mt.size() == len(trial.ranks)
    for epoch in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call] # torch's own
            if trial.params["rate"] == 0.2 and epoch == 1 and mt.rank() == mt.size() - 1:
                raise RuntimeError("diverged")  # while the other rank waits for gradients
            optimizer.step()
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    gathered = mt.allgather(weights.reshape(1, -1))
    assert len(gathered) == mt.size()
    assert (gathered == weights).all()  # the trial's ranks have the same weights, and no other trial's
    return float(weights.norm())


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (torch.tensor(0.5), "complete"),
        (torch.tensor([[0.5]], dtype=torch.bfloat16), "complete"),
        (torch.tensor(0.5, requires_grad=True), "complete"),
        (torch.tensor(True), "failed"),
        (torch.tensor(0.5 + 0j), "failed"),
        (torch.tensor([0.5, 0.5]), "failed"),
    ],
)
def test_tensors_as_values(value: torch.Tensor, state: str) -> None:
    found = outcome_of_value(1, value)
    assert (found.state, found.value) == (state, 0.5 if state == "complete" else None)


def study(here: Here) -> trials.StudyResult:
    here.join()
    torch.set_num_threads(1)
    space = {"rate": [0.1, 0.2, 0.3], "ranks": [1, 2]}
    sampler = optuna.samplers.GridSampler(space, seed=1)  # type: ignore[arg-type] # its type has no lists of ints
    found = trials.run(objective, space, trials=6, ranks_per_trial="ranks", sampler=sampler)
    assert mt.allreduce(torch.ones(2), op=mt.Sum)[0] == here.size
    return found


def test_a_script_is_an_objective() -> None:
    results = run_ranks(study, 3)
    assert results[1:] == results[:-1]
    found = {(each.params["rate"], each.params["ranks"]): each for each in results[0].trials}
    assert len(found) == 6
    for (rate, ranks), each in found.items():
        assert len(each.ranks) == ranks
        assert each.state == ("failed" if rate == 0.2 else "complete"), each
        assert each.reason.endswith("RuntimeError: diverged" if rate == 0.2 else "")

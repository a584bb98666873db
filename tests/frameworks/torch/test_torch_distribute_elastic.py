"""Scripts with `distribute` under elastic.run: each sample once, and the losses of one process, whoever is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distribute_cases import Ragged, Stream, data, network, sgd
from tests.support.elastic_scripts import ends_of_three
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.data import ArrayDataset, Loader
from multiring.errors import ArgumentError, StateError

EPOCHS, SAMPLES, BATCH = 2, 40, 6
SETUP = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from multiring.data import ArrayDataset

torch.set_num_threads(1)
points = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 6)))
numbers = torch.arange(40)
goals = torch.sin(points.sum(dim=1, keepdim=True))


def made():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_torch():
    tensors = TensorDataset(points, goals, numbers)
    return DataLoader(tensors, 6, shuffle=True, generator=torch.Generator().manual_seed(3))


def of_multiring():
    return ArrayDataset({"points": points.numpy(), "goals": goals.numpy(), "numbers": numbers.numpy()}, seed=4)


def step(model, optimizer, batch):
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
PROGRAM = (
    SETUP
    + """
import json, os, sys, time
import multiring.torch as mt

acts = json.loads(sys.argv[1])
mt.init()
born = mt.rank() if mt.size() > 1 else -1  # newcomers are alone at first
*one, loader = mt.distribute(*made(), of_torch())
*two, other = mt.distribute(*made(), mt.DataLoader(of_multiring(), 6), shares="speed")
state = mt.elastic.TorchState(
    *one, loader=loader, model_of_other=two[0], optimizer_of_other=two[1], other=other, step=0, told=[], sizes=[]
)


@mt.elastic.run
def train(state):
    while state.loader.epoch < 2:
        assert state.other.epoch == state.loader.epoch
        for batch, fed in zip(state.loader, state.other):
            number = acts.get(f"{born} begins {state.step}")
            if number is not None:
                os.kill(os.getpid(), number)
            losses = [state.loader.global_loss(step(*one, batch))]
            losses.append(state.other.global_loss(step(*two, (fed["points"], fed["goals"]))))
            numbers = mt.allgather_object([batch[2].tolist(), fed["numbers"].tolist()])
            seen = [sorted(sum(each, [])) for each in zip(*numbers)]
            state.told = [*state.told, [list(map(float, losses)), seen]]
            state.sizes = [*state.sizes, mt.size()]
            state.step += 1
            state.commit()
            while state.step in (6, 10) and mt.size() < 3:  # until the newcomer is there
                time.sleep(0.1)
                state.commit()


train(state)
print("END", json.dumps([state.sizes, state.told]), flush=True)
mt.shutdown()
"""
)


def alone() -> list[list[Any]]:
    """Return each step's losses and samples in one process, without multiring.torch."""
    names: dict[str, Any] = {}
    exec(SETUP, names)  # noqa: S102 -- the program of the ranks
    one, two = names["made"](), names["made"]()
    told: list[list[Any]] = []
    fed = Loader(names["of_multiring"](), BATCH)
    torchs = names["of_torch"]()
    for _ in range(EPOCHS):
        for batch, other in zip(torchs, fed, strict=True):
            pair = [torch.from_numpy(other[name]) for name in ("points", "goals")]
            losses = [float(names["step"](*one, batch)), float(names["step"](*two, pair))]
            told.append([losses, [sorted(batch[2].tolist()), sorted(other["numbers"].tolist())]])
    return told


def test_scripts_go_on(tmp_path: Path) -> None:
    """Rank 0, which draws the order, is killed in the middle of a pass; later a rank is asked to leave."""
    ends, errors = ends_of_three(tmp_path, PROGRAM, {"0 begins 4": 9, "1 begins 8": 15})
    assert len(ends) == 3, errors
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    truth = alone()
    torch.set_num_threads(threads)
    for sizes, told in ends:
        assert sizes[:4] == [3] * 4
        assert 2 in sizes[4:6]
        assert 2 in sizes[8:10]
        assert sizes[10:] == [3] * 4
        assert [seen for _, seen in told] == [seen for _, seen in truth]
        for (losses, _), (wanted, _) in zip(told, truth, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-10)


class Endless(Ragged):
    """Batches without an end, and with the length of an epoch."""

    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


def test_places() -> None:
    run_ranks(keep_places, 2)


def keep_places(here: Here) -> None:  # noqa: PLR0915 -- one job for all checks
    join(here)

    def made(loader: Any, **rules: Any) -> Any:
        model = network()
        return mt.distribute(model, sgd(model.parameters()), loader, **rules)[2]

    sharded = {"batch": "per_rank", "learning_rate": "keep", "sharded": True}
    for text, loader in (
        ("sharded=True.* cannot be kept", made(DataLoader(data(5, seed=here.rank), 5), **sharded)),
        ("the place in an iterable data set, Stream, cannot be kept", made(DataLoader(Stream(data()), 5))),
        ("the place in a pass of generator cannot", made(DataLoader(data(), batch_sampler=([i] for i in range(9))))),
    ):
        with pytest.raises(ArgumentError, match=text):
            mt.elastic.TorchState(loader=loader)
    numbers = torch.arange(11)
    loader = made(DataLoader(TensorDataset(numbers), 4, shuffle=True), check=False)
    with pytest.raises(StateError, match=r"the place in the passes of this loader is not kept: call keep_place\(\)"):
        loader.state_dict()
    state: Any = mt.elastic.TorchState(loader=loader)
    assert state.loader is loader
    whole = []
    batches = iter(loader)
    for _ in range(2):
        whole += mt.allgather(next(batches)[0]).tolist()
    state.save()
    assert len(loader) == 3
    for _ in range(2):  # the last batch is handed out again after the state is restored
        state.restore()
        (last,) = [mt.allgather(each).tolist() for (each,) in loader]
        assert sorted(whole + last) == list(range(11))
    assert loader.epoch == 1
    again = [number for (each,) in loader for number in mt.allgather(each).tolist()]
    assert sorted(again) == list(range(11))
    assert loader.epoch == 2
    for text, wrong in (
        ("want a result of its state_dict", {"epoch": 1}),
        ("the state is of a data set of 12 samples, and this one has 11", {**loader.state_dict(), "samples": 12}),
        ("the state has 1 random number generators", {**loader.state_dict(), "random": [torch.get_rng_state()]}),
    ):
        with pytest.raises(ArgumentError, match=text):
            loader.load_state_dict(wrong)
    # With a batch for each rank, the place counts the batches of one process, so it holds for any number of ranks.
    rules = {"batch": "per_rank", "learning_rate": "keep"}
    for drops, wanted in ((False, [4, 4, 3]), (True, [4, 4])):
        paired = made(DataLoader(TensorDataset(numbers), 2, drop_last=drops), check=False, **rules)
        paired.keep_place()
        assert [len(mt.allgather(each)) for (each,) in paired] == wanted
        assert paired.epoch == 1
        next(iter(paired))
        assert paired.state_dict()["done"] == 2
        assert paired.state_dict()["passes"] == 1
        assert [len(mt.allgather(each)) for (each,) in paired] == wanted[1:]
        assert paired.state_dict()["passes"] == 2
    over, other = iter(loader), iter(loader)
    next(over)
    next(other)
    with pytest.raises(StateError, match="this iteration of the loader is over, because another one has begun"):
        next(over)
    endless = made(DataLoader(data(), batch_sampler=Endless()))
    endless.keep_place()
    with pytest.raises(Exception, match="drew more than 60 batches in a pass, 10 times as many as its length"):
        next(iter(endless))
    fed: Any = mt.elastic.TorchState(loader=mt.DataLoader(ArrayDataset({"x": np.arange(9)}), 4))
    first = next(iter(fed.loader))["x"].tolist()
    fed.restore()
    assert next(iter(fed.loader))["x"].tolist() == first

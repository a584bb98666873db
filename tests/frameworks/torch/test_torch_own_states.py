"""A Shampoo whose matrices are divided among the ranks loses nothing with a lost rank; residuals go on with the others.

The losses are compared, in float64, with the same steps in one process, which has as many ranks at each step.
"""

from pathlib import Path

import torch
from tests.support.elastic_scripts import ends_of_three
from torch import Tensor, nn

import multiring.torch as mt
from multiring._frontend.elastic.own import RankChange
from multiring._frontend.elastic.snapshot import Outline, value_in
from multiring.torch.elastic.own import residuals_now

SETUP = """
import torch
import multiring.torch as mt

torch.set_num_threads(1)
torch.manual_seed(0)
inputs, goals = torch.randn(64, 6, dtype=torch.float64), torch.randn(64, 3, dtype=torch.float64)


def made():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    how = mt.optim.Eigendecomposition(frequency=3, precision=torch.float64, block=4)
    return model, mt.optim.Shampoo(model.parameters(), lr=0.01, eigendecomposition=how)


def loss_of(model, at):
    return ((model(inputs[at]) - goals[at]) ** 2).mean()


def rows(step, size):
    return [(11 * step + rank) % 64 for rank in range(size)]
"""
PROGRAM = (
    SETUP
    + """
import json, os, signal, sys
from multiring._frontend.elastic.peer_copies import PeerCopies

acts = json.loads(sys.argv[1])
copies = []


def keep(self, *, keep=PeerCopies.keep, **words):
    copies[:] = [self]
    keep(self, **words)


PeerCopies.keep = keep
mt.init()
born = mt.rank() if mt.size() > 1 else -1  # newcomers are alone at first
model, optimizer = made()
optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
state = mt.elastic.TorchState(model, optimizer, step=0, sizes=[], losses=[])


@mt.elastic.run
def train(state):
    while state.step < 12 or state.sizes[-2:] != [3, 3]:
        if f"0 copied {state.step}" in acts:
            # A rank that dies before its copy has come to its holder takes its last commit with it.
            for each in copies:
                each.finish()
            mt.allreduce(torch.zeros(1))
        number = acts.get(f"{born} begins {state.step}", acts.get(f"{born} copied {state.step}"))
        if number is not None:
            os.kill(os.getpid(), number)
        optimizer.zero_grad()
        loss_of(model, rows(state.step, mt.size())[mt.rank()]).backward()
        optimizer.step()
        with torch.no_grad():
            state.losses = [*state.losses, float(loss_of(model, list(range(64))))]
        state.sizes = [*state.sizes, mt.size()]
        state.step += 1
        state.commit()


train(state)
print("END", json.dumps([state.sizes, state.losses]), flush=True)
mt.shutdown()
"""
)


def test_a_divided_optimizer_loses_nothing(tmp_path: Path) -> None:
    ends, errors = ends_of_three(tmp_path, PROGRAM, {"0 copied 4": 9, "1 begins 7": 15})
    assert ends, errors
    sizes, losses = ends[0]
    assert all(end == ends[0] for end in ends)
    assert sizes[:5] == [3, 3, 3, 3, 2]
    space: dict[str, object] = {}
    exec(SETUP, space)  # noqa: S102 -- the program's own model
    model, optimizer = space["made"]()  # type: ignore[operator] # from exec
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        space["loss_of"](model, space["rows"](step, size)).backward()  # type: ignore[operator] # as above
        optimizer.step()
        with torch.no_grad():
            loss = float(space["loss_of"](model, list(range(64))))  # type: ignore[operator] # as above
        assert abs(loss - losses[step]) < 1e-10, step


def test_what_is_not_sent_yet_counts_as_before() -> None:
    """After every change of 3 ranks to 1 to 4, the mean or sum of the residuals is as it was."""
    values = {rank: {0: torch.tensor([1.0 + rank, 2.0]), 3: torch.tensor([10.0**rank])} for rank in range(3)}
    for former in [(0, 1, 2), (1,), (0, 2), (2, 0, None), (0, 1, 2, None), (1, None, None, None)]:
        for averages in (True, False):
            changes = [RankChange(rank=rank, former=former, former_size=3) for rank in range(len(former))]
            found = [residuals_now(values, change, averages=averages) for change in changes]
            for at in (0, 3):
                before = sum((each[at] for each in values.values()), torch.zeros(1)) / (3 if averages else 1)
                after = sum((each[at] for each in found if at in each), torch.zeros(1))
                assert torch.allclose(before, after / (len(former) if averages else 1)), (former, averages)


def test_snapshots_of_tensors() -> None:
    tensors: list[Tensor] = [
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.empty(0, 4),
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        nn.Parameter(torch.ones(2)).detach(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
    ]
    outline = Outline({"tensors": tensors, "n": 3})
    array = torch.full((outline.size_bytes,), 255, dtype=torch.uint8).numpy()
    outline.copy_into(array)
    found = value_in(array)
    array[:] = 0
    assert found["n"] == 3
    for one, other in zip(tensors, found["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert other.requires_grad == (one.requires_grad and one.is_leaf)  # a graph is not in a snapshot
        other.detach().zero_()  # it has memory of its own, which may be written


def test_saving_without_a_commit_keeps_all() -> None:
    """`save` and `restore`, as Horovod's programs call them, have the whole optimizer."""
    space: dict[str, object] = {}
    exec(SETUP, space)  # noqa: S102 -- as above
    model, optimizer = space["made"]()  # type: ignore[operator] # as above
    state = mt.elastic.TorchState(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        space["loss_of"](model, [1, 2]).backward()  # type: ignore[operator] # as above
        optimizer.step()
    state.save()
    kept = [each.clone() for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor)]
    optimizer.step()
    state.restore()
    found = [each for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor)]
    assert len(kept) == len(found) > 10
    assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))

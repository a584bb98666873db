"""The mistakes that docs/mistakes.md lists; each function makes one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multiring
import multiring.torch

Mistake = Callable[[], object]
WRONG: Any = None
mt: Any = multiring.torch  # Any: a type checker would reject some mistakes
alone: dict[str, Mistake] = {}  # in a process that has not joined a job
together: dict[str, Mistake] = {}  # on two ranks of a job, which must continue to work


def made_by(table: dict[str, Mistake], what: str) -> Callable[[Mistake], Mistake]:
    """Register a function in `table` under the page's words for the mistake."""

    def enter(make: Mistake) -> Mistake:
        assert what not in table, what
        table[what] = make
        return make

    return enter


def network(hidden: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data(seed: int = 0) -> TensorDataset:
    images = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, torch.zeros(8, dtype=torch.long))


def loader(seed: int = 0, batch_size: int = 4) -> Any:
    return DataLoader(data(seed), batch_size)


def shared(model: nn.Module, **options: Any) -> Any:
    return mt.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def backward(model: nn.Module) -> None:
    cross_entropy(model(torch.ones(4, 4)), torch.zeros(4, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]


def number() -> int:
    return int(mt.rank())


# ---- outside a job ----

made_by(alone, "`mt.rank()`, or another call, before `mt.init()`")(mt.rank)


@made_by(alone, "`DistributedOptimizer(...)` before `mt.init()`")
def _() -> object:
    return shared(network())


@made_by(alone, "`with mt.on_first_rank():` before `mt.init()`")
def _() -> object:
    with mt.on_first_rank():
        return "prepared"


@made_by(alone, '`multiring.run("train.py", ranks=2)`')
def _() -> object:
    return multiring.run("train.py", ranks=2)  # type: ignore[arg-type] # the mistake


@made_by(alone, "`multiring.run(train(), ranks=2)`")
def _() -> object:
    return multiring.run(WRONG, ranks=2)


# This mistake is last because the others need a process that never joined a job.
@made_by(alone, "`mt.allreduce(...)` after `mt.shutdown()`")
def _() -> object:
    mt.init()
    mt.shutdown()
    return mt.allreduce(torch.ones(2))


# ---- in a job ----


@made_by(together, "`multiring.init(stall_timeout_s=5)` in a job with another value")
def _() -> object:
    return multiring.init(stall_timeout_s=5)


@made_by(together, "`mt.distribute(model, loader, optimizer)`, in the wrong order")
def _() -> object:
    model = network()
    return mt.distribute(model, loader(), sgd(model))


@made_by(together, "the optimizer was made for another model than the trained one")
def _() -> object:
    return mt.distribute(network(), sgd(network()), loader())


@made_by(together, "`mt.distribute` twice")
def _() -> object:
    model = network()
    _, optimizer, dealt = mt.distribute(model, sgd(model), loader())
    return mt.distribute(model, optimizer, dealt)


@made_by(together, "a DistributedSampler left in the script")
def _() -> object:
    model = network()
    sampler: Any = DistributedSampler(data(), 2, number())
    return mt.distribute(model, sgd(model), DataLoader(data(), 4, sampler=sampler))


@made_by(together, "data that each rank shuffles or splits with its own seed")
def _() -> object:
    model = network()
    return mt.distribute(model, sgd(model), loader(seed=number()))


@made_by(together, "the script divides the batch size among the ranks")
def _() -> object:
    model = network()
    return mt.distribute(model, sgd(model), loader(batch_size=4 // (number() + 1)))


@made_by(together, "a different model on one rank")
def _() -> object:
    return shared(network(hidden=3 + number()))


@made_by(together, "a scheduler was made before a `distribute` that scales the learning rate")
def _() -> object:
    model = network()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return mt.distribute(model, optimizer, loader(), batch="per_rank", learning_rate="linear")


@made_by(together, "`DistributedOptimizer(model)`")
def _() -> object:
    return mt.DistributedOptimizer(network())


@made_by(together, "`model.parameters()` instead of `model.named_parameters()`")
def _() -> object:
    model = network()
    return mt.DistributedOptimizer(sgd(model), model.parameters())


@made_by(together, "an optimizer that cannot be distributed")
def _() -> object:
    return mt.DistributedOptimizer(torch.optim.LBFGS(network().parameters()))


@made_by(together, '`compression="fp8"`')
def _() -> object:
    return shared(network(), compression="fp8")


@made_by(together, '`op="mean"`')
def _() -> object:
    return mt.allreduce(torch.ones(2), op="mean")


@made_by(together, "`zero_grad()` between `backward()` and `step()`")
def _() -> object:
    model = network()
    optimizer = shared(model)
    backward(model)
    return optimizer.zero_grad()


@made_by(together, "two backward passes for one step")
def _() -> object:
    model = network()
    optimizer = shared(model)
    backward(model)
    backward(model)
    return optimizer


@made_by(together, "clipping before the last backward pass of a step")
def _() -> object:
    model = network()
    optimizer = shared(model, backward_passes_per_step=2)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return optimizer.step()


@made_by(together, "a layer is unfrozen after the optimizer was made")
def _() -> object:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = shared(model)
    model[0].weight.requires_grad_(True)
    backward(model)
    return optimizer.step()


@made_by(together, "tensors of different shapes")
def _() -> object:
    return mt.allreduce(torch.ones(2 + number()), name="shapes")


@made_by(together, "an array instead of a tensor")
def _() -> object:
    return mt.allreduce(np.ones(2))


@made_by(together, "a tensor without values")
def _() -> object:
    return mt.allreduce(torch.ones(2, device="meta"))


@made_by(together, "`root_rank=2` in a job of two ranks")
def _() -> object:
    return mt.broadcast(torch.ones(2), root_rank=2)


@made_by(together, "`broadcast_parameters(model.state_dict(), ...)` of a model with extra state")
def _() -> object:
    return mt.broadcast_parameters({"_extra_state": torch.ones(1)}, root_rank=0)


@made_by(together, "no broadcast, so each rank trains its own model")
def _() -> object:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(float(number()))
    optimizer = mt.DistributedOptimizer(sgd(model), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + step + number())).sum().backward()
        optimizer.step()
    return "trained"


@made_by(together, "dicts with different names for `mt.gather`")
def _() -> object:
    return mt.gather({"guess" if number() else "label": torch.ones(2)})


@made_by(together, "`process_set=[0, 1]`")
def _() -> object:
    return mt.allreduce(torch.ones(2), process_set=[0, 1])


@made_by(together, "`mt.add_process_set` in a job with fixed process sets")
def _() -> object:
    return mt.add_process_set([0])


@made_by(together, "metrics with different names on different ranks")
def _() -> object:
    return mt.mean({"accuracy" if number() else "loss": 0.5})


@made_by(together, "`mt.mean(loss)`")
def _() -> object:
    return mt.mean(torch.ones(1))


@made_by(together, "`mt.seed_everything(mt.rank())`")
def _() -> object:
    return mt.seed_everything(number())


@made_by(together, "`mt.save(model.state_dict(), path)`, the arguments of torch.save")
def _() -> object:
    return mt.save(network().state_dict(), "last")


@made_by(together, "`mt.save` of an object that cannot be saved")
def _() -> object:
    return mt.save("last", schedule=lambda epoch: epoch)


@made_by(together, "`mt.save` to a folder with other files")
def _() -> object:
    if number() == 0:
        Path("run").mkdir()
        Path("run", "metrics.csv").write_text("loss\n")
    mt.barrier()
    return mt.save("run", model=network())


@made_by(together, "`mt.save` of an array that `mt.load` could not restore")
def _() -> object:
    return mt.save("last", model={"w": torch.eye(2).to_sparse()})


@made_by(together, "`mt.load` of a float32 checkpoint into a bfloat16 model")
def _() -> object:
    mt.save("float32", model=nn.Linear(2, 1))
    return mt.load("float32", model=nn.Linear(2, 1).to(torch.bfloat16))


@made_by(together, "`mt.save` with a different path on each rank")
def _() -> object:
    return mt.save(f"last-{number()}", epoch=1)


@made_by(together, "`mt.load` of a path without a checkpoint")
def _() -> object:
    return mt.load("nothing")


@made_by(together, "`mt.load` of a file that torch.save wrote")
def _() -> object:
    if number() == 0:
        torch.save({}, "model.pt")
    mt.barrier()
    return mt.load("model.pt", model=network())


@made_by(together, "`mt.load` into a model with other shapes")
def _() -> object:
    mt.save("saved", model=network())
    return mt.load("saved", model=network(hidden=5))


# This mistake is last because the ranks' unnamed calls no longer match after it.
@made_by(together, "`if mt.rank() == 0: mt.allreduce(...)`")
def _() -> object:
    return mt.allreduce(torch.ones(2), name="only on one") if number() == 0 else mt.barrier()


def make_alone(folder: str) -> dict[str, str]:
    """Make the mistakes outside a job; return each error by the page's words."""
    os.chdir(folder)
    return {what: said(make) for what, make in alone.items()}


def make_together(folder: str) -> dict[str, str]:
    """Make the mistakes of a rank in one job; return each error by the page's words."""
    os.chdir(Path(folder))
    return {what: said(make) for what, make in together.items()}


def said(make: Mistake) -> str:
    """Return the type and text of the error that a mistake raises, or ""."""
    try:
        make()
    except multiring.errors.MultiringError as error:
        # Name the public class that users catch; errors of _frontend/errors.py derive from it and from another class.
        kind = next(each for each in type(error).__mro__ if each.__module__ == multiring.errors.__name__)
        return f"{kind.__name__}: {error}"
    return ""

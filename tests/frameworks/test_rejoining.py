"""Objects made in a job of 3 ranks work in the next job of 2 or 3 ranks.

An old torch object gives the same values as a new object beside it. Compiled programs of JAX and TensorFlow contain the
number of ranks in shapes, factors and roots. They must be traced again, or read the number at run time.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, Process, run_ranks
from tests.support.rejoining import rejoin, with_jax, with_tensorflow
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import multiring.torch as mt
from multiring.data import Dataset
from multiring.errors import StateError

PATIENT_S = 240.0  # compilation is slow on few cores
OPTIMIZERS: dict[str, Any] = {
    "average": lambda model: mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    ),
    "int8": lambda model: mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=mt.Compression.int8, error_feedback=True
    ),
    "muon": lambda model: mt.DistributedOptimizer(mt.Muon([model.weight], lr=0.1)),
    "passes": lambda model: mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
    ),
}


class Trained:
    """A model and its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = OPTIMIZERS[name](self.model)
        self.passes = 2 if name == "passes" else 1

    def steps(self, first: int, last: int, *, clears: str) -> None:
        """Train on this rank's samples; `clears` names the object that clears gradients."""
        for number in range(first, last):
            getattr(self, clears).zero_grad()
            for part in range(self.passes):
                torch.manual_seed(10 * number + part)
                inputs, wanted = (torch.randn(12, size)[mt.rank() :: mt.size()] for size in (4, 2))
                loss = ((self.model(inputs) - wanted) ** 2).mean() / self.passes
                loss.backward()
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


class Stream(IterableDataset[Tensor]):
    """A stream of samples; every rank reads all of it."""

    def __iter__(self) -> Any:
        return iter(torch.arange(24.0))


def loader(kind: str, **options: Any) -> Any:
    samples: Any = Stream() if kind == "stream" else torch.arange(24.0)
    plain = DataLoader(samples, 6, num_workers=kind == "workers", persistent_workers=kind == "workers")
    model = nn.Linear(1, 1)
    return mt.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plain, check=False, **options)[2]


LOADERS = [(kind, options) for kind in ("map", "stream") for options in ({}, {"batch": "per_rank"})]
LOADERS += [("workers", {})]


def with_torch(here: Here, ranks: int, clears: str, folder: str) -> None:
    enter()
    warnings.simplefilter("ignore")
    if here.rank == 0:
        np.save(f"{folder}/a.npy", np.arange(24))
    mt.barrier()
    trained = {name: Trained(name) for name in OPTIMIZERS}
    for each in trained.values():
        each.steps(0, 2, clears=clears)
    keep = {"learning_rate": "keep"}
    loaders = [loader(kind, **options, **(keep if options else {})) for kind, options in LOADERS]
    scaled = loader("map", batch="per_rank", learning_rate="linear")
    epochs = [[batch.tolist() for batch in each] for each in loaders]
    sampler = mt.elastic.ElasticSampler(range(24), shuffle=False)
    sampler.record_batch(0, 2)
    fed = mt.IterableDataset(Dataset(folder, seed=3), 6)
    streams: list[DataLoader[Any]] = [
        DataLoader(each, None, num_workers=1, persistent_workers=True) for each in (fed, copy.deepcopy(fed))
    ]
    assert all(len(list(each)) == 4 for each in streams)
    if not rejoin(mt, here, ranks):
        return
    for name, each in trained.items():
        before = each.values()
        other = Trained(name)
        with torch.no_grad():
            for parameter, value in zip(other.model.parameters(), before, strict=True):
                parameter.copy_(value)
        other.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))
        each.steps(2, 4, clears=clears)
        other.steps(2, 4, clears="optimizer")
        for one, two in zip(each.values(), other.values(), strict=True):
            # Residuals of int8 belong to one rank, so the state of a job of another size is dropped.
            assert torch.allclose(one, two, atol=1e-6) or (name == "int8" and ranks != here.size), name
            assert torch.equal(mt.allreduce(one, op=mt.Min), mt.allreduce(one, op=mt.Max)), name
    for (kind, options), each, epoch in zip(LOADERS, loaders, epochs, strict=True):
        anew = loader(kind, **options, **(keep if options else {}))
        wanted = [batch.tolist() for batch in anew]
        assert [batch.tolist() for batch in each] == wanted, (kind, options)
        assert (wanted == epoch) == (ranks == here.size)
        assert kind == "stream" or len(each) == len(anew)
    if ranks != here.size:
        with pytest.raises(StateError, match="learning rate was scaled for 3"):
            iter(scaled)
    begin = 2 * here.size if ranks != here.size else 0  # another size leaves out recorded samples
    assert list(sampler) == list(range(begin + mt.rank(), 24, ranks))
    other_fed = mt.IterableDataset(Dataset(folder, seed=3), 6)
    other_fed.set_epoch(1)
    for stream in streams:
        stream.dataset.set_epoch(1)  # type: ignore[attr-defined] # multiring's data set
        assert [batch["array"].tolist() for batch in stream] == [batch["array"].tolist() for batch in other_fed]


@pytest.mark.parametrize(("ranks", "clears"), [(2, "optimizer"), (3, "model")])
def test_what_torch_made_is_of_the_job_that_there_is(tmp_path: Path, ranks: int, clears: str) -> None:
    run_ranks(with_torch, 3, ranks, clears, str(tmp_path))


def sets_stay(here: Here) -> None:
    enter(process_sets="dynamic")
    first, pair, other = (mt.add_process_set(ranks) for ranks in ([0], [0, 1], [0, 2]))
    mt.remove_process_set(first)
    again = mt.ProcessSet([0, 1])
    mt.init(process_sets=[again])
    failures = [here.rank]

    @mt.elastic.run
    def go(_state: Any) -> list[int | None]:
        if failures:
            raise mt.HorovodInternalError(f"the test says so, on rank {failures.pop()}")
        return [each.process_set_id for each in (first, pair, other, again)]

    assert go(mt.elastic.TorchState()) == [None, 2, 3, 2]


def test_process_sets_keep_their_numbers() -> None:
    run_ranks(sets_stay, 3)


def test_what_jax_compiled_is_of_the_job_that_there_is() -> None:
    pytest.importorskip("jax")
    run_ranks(with_jax, 3, process=Process(nursery="jax", beforehand=("multiring.jax",)), deadline_s=PATIENT_S)


def test_what_tensorflow_traced_is_of_the_job_that_there_is() -> None:
    pytest.importorskip("tensorflow")
    process = Process(nursery="tf", beforehand=("multiring.tensorflow",))
    run_ranks(with_tensorflow, 3, process=process, deadline_s=PATIENT_S)

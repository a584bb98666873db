"""Data-loader workers, which are forked from a rank, while the rank trains."""

import os

import pytest
from tests.support.faults import kill
from tests.support.plain import backward, join, network, samples
from tests.support.ranks import Here, report_of, run_ranks
from tests.support.sharing import expect_same_parameters, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import multiring
import multiring.torch as mt
from multiring.errors import PeerLostError, StateError


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples, and the process that read them; a worker must not use multiring."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        with pytest.raises(StateError, match="was forked from rank"):
            multiring.world()
        images, labels = samples(index, 1)
        return images[0], labels[0], os.getpid()


def train(here: Here, epochs: int) -> None:
    model = network()
    optimizer = sgd(model)
    loader = DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    for _ in range(epochs):
        for images, labels, readers in loader:
            assert os.getpid() not in readers.tolist()
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(images + here.rank), labels))
            optimizer.step()
            here.reach("training")
    expect_same_parameters(model)


def test_workers_read_while_ranks_train() -> None:
    """The rig fails this test if a rank hangs, fails, or leaves a process behind."""
    run_ranks(train_with_workers, 2)


def train_with_workers(here: Here) -> None:
    join(here)
    train(here, 2)
    mt.shutdown()


def test_death_of_a_rank_with_workers_is_seen() -> None:
    report = report_of(train_for_ever_with_workers, 2, faults=[kill(1).at("training")])
    assert isinstance(report.outcomes[0].error, PeerLostError)


def train_for_ever_with_workers(here: Here) -> None:
    join(here)
    train(here, 1_000_000)

"""Data sets in frameworks: the same samples, losses and resumption on any ranks."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.data_sets import packed
from tests.support.ranks import Here, run_ranks

import multiring.torch as mt
from multiring.data import Dataset
from multiring.data.readers.source import Record
from multiring.errors import ArgumentError, DataError

SAMPLES = 12
Curve = list[float]


def noisy(record: Record, generator: np.random.Generator) -> Record:
    """Add noise to the array, and drop the image."""
    return {"array": record["array"] + generator.normal(size=(3, 4)).astype(np.float32), "label": record["label"] % 3}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed(tmp_path_factory.mktemp("data") / "pack")


def trained(here: Here, url: str, state: dict[str, Any] | None, stop_after: int) -> tuple[Curve, dict[str, Any]]:
    """Train two epochs of 12 samples in batches of 5, or only `stop_after` steps.

    Return the losses, and the state of the model and the data.
    """
    del here
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = mt.DataLoader(Dataset(url, transform=noisy, seed=2), 5)
    if state is not None:
        model.load_state_dict({name: torch.tensor(each) for name, each in state["model"].items()})
        loader.load_state_dict(state["data"])
    model, optimizer, loader = mt.distribute(model, optimizer, loader)
    losses: Curve = []
    for epoch in range(loader.epoch, 2):
        assert loader.epoch == epoch
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["array"].flatten(1)), batch["label"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loader.global_loss(loss)))
            if len(losses) == stop_after:
                break
        if len(losses) == stop_after:
            break
    state = {"model": {name: each.tolist() for name, each in model.state_dict().items()}, "data": loader.state_dict()}
    loader.close()
    mt.shutdown()
    return losses, state


def whole_and_begun(here: Here, url: str) -> tuple[Curve, Curve, dict[str, Any]]:
    """Train to the end, and train four steps from the start; check wrong arguments.

    Return both loss curves, and the state after the four steps.
    """
    whole, _ = trained(here, url, None, 99)
    first, state = trained(here, url, None, 4)
    model = torch.nn.Linear(12, 3)
    loader = mt.DataLoader(Dataset(url, transform=noisy), 5)
    with pytest.raises(ArgumentError, match="this loader was not made by `distribute`"):
        loader.global_loss(torch.zeros(()))
    with pytest.raises(ArgumentError, match="want batch='global'"):
        mt.distribute(model, torch.optim.SGD(model.parameters(), 0.1), loader, batch="per_rank", learning_rate="keep")
    mt.shutdown()
    return whole, first, state


def whole_and_resumed(here: Here, url: str, state: dict[str, Any]) -> tuple[Curve, Curve]:
    """Train to the end, and train from `state` to the end; return both curves."""
    whole, _ = trained(here, url, None, 99)
    rest, _ = trained(here, url, state, 99)
    return whole, rest


def test_losses_are_those_of_one_process_also_when_resumed_on_other_ranks(url: str) -> None:
    alone, first, state = run_ranks(whole_and_begun, 1, url)[0]
    assert len(alone) == 6
    assert state["data"]["samples"] == 5
    for whole, rest in run_ranks(whole_and_resumed, 3, url, state):
        assert whole == pytest.approx(alone, rel=1e-5)
        assert first + rest == pytest.approx(alone, rel=1e-5)


def arrays(batches: Iterator[Any]) -> list[Any]:
    return [np.asarray(each["array"]) for each in batches]


def test_torchs_own_loader_gives_the_same_whatever_its_workers(url: str) -> None:
    data = Dataset(url, transform=noisy)
    loader = mt.DataLoader(data, 5)
    wanted = arrays(iter(loader))
    loader.close()
    for workers in (0, 2):
        own = mt.IterableDataset(data, 5)
        # torch would warn if the data set's length differed from the sum of its workers' parts.
        found = arrays(iter(torch.utils.data.DataLoader(own, batch_size=None, num_workers=workers)))
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    own.load_state_dict(mt.IterableDataset(data, 5).state_after(2))
    assert len(own) == 1
    (rest,) = arrays(iter(own))
    assert np.array_equal(rest, wanted[2])
    own.set_epoch(1)
    assert len(own) == 3


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_frameworks_get_their_own_arrays(url: str, framework: str) -> None:
    """Use another process, because a process that used JAX must not fork."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    run_ranks({"jax": feed_jax, "tensorflow": feed_tensorflow}[framework], 1, url)


def feed_jax(_: Here, url: str) -> None:
    import jax  # noqa: PLC0415 -- only in the rank

    import multiring.jax as mj  # noqa: PLC0415

    data = Dataset(url, transform=noisy)
    loader = mt.DataLoader(data, 5)
    wanted = arrays(iter(loader))
    loader.close()
    of_jax = mj.DataLoader(data, 5)
    batches = list(of_jax)
    of_jax.close()
    assert all(isinstance(each["array"], jax.Array) for each in batches)
    assert all(np.array_equal(one, other) for one, other in zip(arrays(iter(batches)), wanted, strict=True))
    large = Dataset(url, transform=with_large_label)
    with pytest.raises(DataError, match="label has whole numbers of more than 32 bits, which JAX narrows to int32"):
        list(mj.DataLoader(large, 5))
    with jax.enable_x64(True):
        assert max(int(each["label"].max()) for each in mj.DataLoader(large, 5)) == 2**40


def with_large_label(record: Record, generator: np.random.Generator) -> Record:
    """Return a label whose integer type differs between samples."""
    del generator
    number = int(record["label"])
    return {"label": np.int64(2**40) if number % 3 == 2 else np.int8(number % 3)}


def feed_tensorflow(_: Here, url: str) -> None:
    import multiring.tensorflow as mtf  # noqa: PLC0415 -- only in the rank

    data = Dataset(url, transform=noisy)
    loader = mt.DataLoader(data, 5)
    wanted = arrays(iter(loader))
    loader.close()
    of_tensorflow = mtf.DataLoader(data, 5)
    found = list(of_tensorflow.dataset("array", "label"))
    assert [tuple(each[0].shape) for each in found] == [(5, 3, 4), (5, 3, 4), (2, 3, 4)]
    assert all(np.array_equal(one[0].numpy(), other) for one, other in zip(found, wanted, strict=True))
    assert of_tensorflow.state_dict()["epoch"] == 1
    with pytest.raises(ArgumentError, match="the arrays"):
        of_tensorflow.dataset("colour")
    of_tensorflow.close()
    # Without this error, tf.data would narrow the label to the type of the first batch.
    uneven = mtf.DataLoader(Dataset(url, transform=with_large_label, shuffle="none"), 2)
    with pytest.raises(Exception, match="label is int64 in a batch, but int8 in the data set's first sample"):
        list(uneven.dataset("label"))
    uneven.close()


def broken(record: Record, generator: np.random.Generator) -> Record:
    """Raise an error for samples 0, 2, 4 and 5."""
    del generator
    if int(record["label"]) in {0, 2, 4, 5}:
        raise ValueError("it is broken")
    return {"label": record["label"]}


def weighed(here: Here, url: str) -> list[tuple[int, float]]:
    """Return the number of this rank's samples in each batch, and their weight."""
    del here
    mt.init()
    loader = mt.DataLoader(Dataset(url, transform=broken, shuffle="none"), 4, skip_bad=True)
    return [(loader.share.samples, loader.share.weight) for _ in loader]


def test_ranks_of_a_job_weigh_what_all_have_left(url: str) -> None:
    first, second = run_ranks(weighed, 2, url)
    # Of samples 0 to 3 rank 0 has none left. Of 4 to 7 each rank has one, and of 8 to 11 each rank has two.
    assert first == [(0, 0.0), (1, 1.0), (2, 1.0)]
    assert second == [(2, 2.0), (1, 1.0), (2, 1.0)]


def text_and_records(record: Record, generator: np.random.Generator) -> Record:
    """Return an array of a type that torch does not have."""
    del record, generator
    return {"row": np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")])}


def test_torch_has_no_type_for_records(url: str) -> None:
    loader = mt.DataLoader(Dataset(url, transform=text_and_records), 5)
    with pytest.raises(DataError, match=r"row is an array of .*, for which torch has no type"):
        next(iter(loader))
    loader.close()

"""Wrong values for torch are refused at once; if only one rank passes one, no other rank waits for it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.bad_values import Case, require_refused
from tests.support.plain import backward, join, network
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.data import ArrayDataset, Dataset
from multiring.errors import ArgumentError, MismatchError
from multiring.training import (
    TrainingOptions,
    TrainingRun,
    TrainingTask,
    read_baselines,
    steps_per_epoch,
    wilson_interval,
    write_baselines,
)

COUNT = 12


def samples(seed: int = 0) -> ArrayDataset:
    return ArrayDataset({"x": np.arange(4.0 * COUNT, dtype=np.float32).reshape(COUNT, 4)}, seed=seed)


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Take a step, so that an option that is accepted but cannot be used is found."""
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = make([weight])
    backward(weight.square().sum())
    optimizer.step()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], 0.1)


def optimizer_cases() -> Iterator[Case]:
    numbers = ("lr", "weight_decay", "eps")
    yield Case(
        title="LAMB",
        call=lambda **options: stepped(lambda weights: mt.LAMB(weights, **options)),
        arguments={
            "lr": 0.5,
            "weight_decay": 0.5,
            "eps": 0.5,
            "betas": (0.9, 0.9),
            "clip": 2.0,
            "bias_correction": True,
        },
        kinds={
            **dict.fromkeys(numbers, "number"),
            "betas": "data set",
            "clip": "number or None",
            "bias_correction": "flag",
        },
    )
    yield Case(
        title="LARS",
        call=lambda **options: stepped(lambda weights: mt.LARS(weights, **options)),
        arguments={"lr": 0.5, "weight_decay": 0.5, "eps": 0.5, "momentum": 0.5, "nesterov": False, "form": "paper"},
        kinds={**dict.fromkeys((*numbers, "momentum"), "number"), "nesterov": "flag", "form": "choice"},
    )
    yield Case(
        title="LARC",
        call=lambda **options: stepped(lambda weights: mt.LARC(torch.optim.SGD(weights, 0.1), **options)),
        arguments={"trust_coefficient": 0.5, "eps": 0.5, "mode": "clip"},
        kinds={"trust_coefficient": "number", "eps": "number", "mode": "choice"},
    )
    yield Case(
        title="Muon",
        call=lambda **options: mt.Muon([nn.Parameter(torch.ones(3, 2))], **options),
        arguments={"lr": 0.5, "weight_decay": 0.5, "momentum": 0.5, "nesterov": True, "iteration": mt.NewtonSchulz()},
        kinds={**dict.fromkeys(("lr", "weight_decay", "momentum"), "number"), "nesterov": "flag"},
    )
    yield Case(
        title="NewtonSchulz",
        call=mt.NewtonSchulz,
        arguments={"steps": 3, "eps": 0.5, "coefficients": (3.4, -4.7, 2.0)},
        kinds={"steps": "from zero", "eps": "number", "coefficients": "data set"},
    )
    yield Case(
        title="Shampoo",
        call=lambda **options: mt.Shampoo([nn.Parameter(torch.ones(3, 2))], **options),
        arguments={"lr": 0.5, "eps": 0.5, "weight_decay": 0.5, "betas": (0.9, 0.9), "grafting": True},
        kinds={**dict.fromkeys(numbers, "number"), "betas": "data set", "grafting": "flag"},
    )
    yield Case(
        title="Eigendecomposition",
        call=mt.Eigendecomposition,
        arguments={"frequency": 3, "block": 8, "method": "qr"},
        kinds={"frequency": "count", "block": "count", "method": "choice"},
    )


def option_cases() -> Iterator[Case]:
    yield Case(
        title="parameter_groups",
        call=lambda **options: mt.parameter_groups(nn.Linear(2, 2), **options),
        arguments={"weight_decay": 0.5, "without": None, "trust_ratio": True},
        kinds={"weight_decay": "number", "without": "function or None", "trust_ratio": "flag"},
    )
    yield Case(
        title="PowerSGD",
        call=mt.PowerSGD,
        arguments={"rank": 2, "seed": 3},
        kinds={"rank": "count", "seed": "from zero"},
    )
    for title, call, name, value, kind in (
        ("accumulate", mt.accumulate, "steps", 2, "count"),
        ("clip_gradients", mt.clip_gradients, "limit", 0.5, "number"),
        ("schedule_learning_rate", mt.schedule_learning_rate, "rule", lambda _: 1.0, "function"),
        ("noise_scale", mt.noise_scale, "samples", 2, "count or None"),
        ("gradient_lag", mt.gradient_lag, "steps", 1, "from zero"),
        ("noise_scale's steps", mt.noise_scale, "every", 2, "count"),
        ("noise_scale's window", mt.noise_scale, "window", 2, "count"),
    ):
        yield Case(
            title=title,
            call=lambda call=call, **options: call(sgd(), **options),
            arguments={name: value},
            kinds={name: kind},
        )
    yield Case(
        title="moving_average",
        call=lambda decay: mt.moving_average(sgd(), nn.Linear(2, 2), decay),
        arguments={"decay": 0.5},
        kinds={"decay": "number"},
    )
    data = mt.IterableDataset(samples(), 4)
    yield Case(
        title="IterableDataset",
        call=mt.IterableDataset,
        arguments={"samples": samples(), "batch": 4, "rank": 0, "ranks": 2},
        kinds={"samples": "data set", "batch": "count", "rank": "from zero or None", "ranks": "count or None"},
    )
    yield Case(title="its epoch", call=data.set_epoch, arguments={"epoch": 1}, kinds={"epoch": "from zero"})
    yield Case(title="its state", call=data.state_after, arguments={"batches": 1}, kinds={"batches": "from zero"})
    yield Case(
        title="DataLoader",
        call=mt.DataLoader,
        arguments={"samples": samples(), "batch": 4, "workers": 1, "drop_last": False},
        kinds={"samples": "data set", "batch": "count", "workers": "count", "drop_last": "flag"},
    )
    yield Case(
        title="ProcessSet", call=lambda rank: mt.ProcessSet([rank]), arguments={"rank": 0}, kinds={"rank": "seed"}
    )
    yield Case(
        title="metrics_hook",
        call=mt.metrics_hook,
        arguments={"start": print, "every": 2},
        kinds={"start": "function", "every": "count"},
    )


def training_cases() -> Iterator[Case]:
    kinds = {bool: "flag", int: "seed", float: "number"}
    fields = {each.name: each.default for each in dataclasses.fields(TrainingOptions)}
    yield Case(
        title="TrainingOptions",
        call=TrainingOptions,
        arguments=fields,
        kinds={name: kinds[type(value)] for name, value in fields.items() if type(value) in kinds} | {"run": "path"},
    )
    yield Case(
        title="wilson_interval",
        call=wilson_interval,
        arguments={"hits": 3, "total": 5},
        kinds={"hits": "from zero", "total": "count"},
    )
    yield Case(
        title="steps_per_epoch",
        call=steps_per_epoch,
        arguments={"samples": 3, "batch": 5},
        kinds={"samples": "from zero", "batch": "count"},
    )


@pytest.mark.parametrize("case", [*optimizer_cases(), *option_cases(), *training_cases()], ids=str)
def test_a_wrong_value_is_refused_at_once(case: Case) -> None:
    require_refused(case)


def test_options_of_numpy_are_written_and_read_again(tmp_path: Path) -> None:
    options = TrainingOptions(batch=np.int64(8), rate=np.float32(0.5), plain=np.bool_(True), run=tmp_path / "run")  # type: ignore[arg-type]
    assert options == TrainingOptions(batch=8, rate=0.5, plain=True, run=str(tmp_path / "run"))
    assert [type(each) for each in (options.batch, options.rate, options.plain, options.run)] == [int, float, bool, str]


def test_scores_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    for scores in ({"majority": 10.0}, {"majority": {"val": "10"}}, {"majority": {"val": float("nan")}}, None):
        with pytest.raises(ArgumentError, match="scores"):
            write_baselines(tmp_path, scores)  # type: ignore[arg-type]
    assert read_baselines(tmp_path) == {}
    write_baselines(tmp_path, {"majority": {"val": np.float32(10)}})
    assert read_baselines(tmp_path) == {"majority": {"val": 10.0}}


class Line(TrainingTask):
    def __init__(self, seed: int) -> None:
        self.training = samples(seed)

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = model(torch.as_tensor(batch["x"])).square().sum(1)
        return found


def differ(here: Here, own: Callable[[], object], text: str, of_own: str | None = None) -> None:
    """Call `own`, which only rank 1 calls with a wrong value: both ranks raise, and the job goes on."""
    kind, match = (ArgumentError, of_own) if here.rank and of_own is not None else (MismatchError, text)
    with pytest.raises(kind, match=match):
        own()
    assert mt.allreduce(torch.ones(1)).item() == 1.0


def pass_wrong_values_on_one_rank(here: Here, folder: str) -> None:
    join(here)
    wrong = here.rank == 1

    def distributed(loader: Any, **options: Any) -> object:
        model = network()
        return mt.distribute(model, torch.optim.SGD(model.parameters(), 0.1), loader, **options)

    differ(here, lambda: mt.seed_everything(True if wrong else 3), "different seeds", "seed=True: want")
    differ(here, lambda: mt.mean({"loss": 1.0}, True if wrong else 3), "failed with", "weight=True")
    differ(
        here,
        lambda: mt.DistributedOptimizer(sgd(), bucket_bytes=2.5 if wrong else 1 << 20),  # type: ignore[arg-type]
        "failed with ArgumentError: bucket_bytes=2.5",
        "bucket_bytes=2.5",
    )
    differ(
        here,
        lambda: mt.broadcast_parameters(network(), root_rank=True if wrong else 1),
        "failed with ArgumentError: root_rank=True",
        "root_rank=True: want one of the set's ranks",
    )
    for options in ({"drop_last": True}, {"skip_bad": True}, {"batch": 3}):
        (name, value), given = *options.items(), {"batch": 4, **(options if wrong else {})}
        told = f"{name}=(False|4).*{name}={value}"
        differ(here, lambda given=given: distributed(mt.DataLoader(samples(), **given)), told)  # type: ignore[misc]
    compare_samples(here, Path(folder), distributed)
    run = str(Path(folder, "run"))
    differ(here, lambda: TrainingRun(Line(0), TrainingOptions(run=run, batch=3 + wrong)), "batch=3.*batch=4")
    differ(here, lambda: TrainingRun(Line(here.rank), TrainingOptions(run=run)), "data set 'training'")


def compare_samples(here: Here, folder: Path, distributed: Callable[..., object]) -> None:
    """Give the ranks files of equal names and sizes, but other contents; and then other transforms."""
    own = folder / str(here.rank)
    own.mkdir()
    np.save(own / "x.npy", np.full((COUNT, 4), here.rank, np.float32))
    told = "the ranks' data sets differ, first in sample .*the transforms or the contents of files differ"
    differ(here, lambda: distributed(mt.DataLoader(Dataset(own), 4)), told)
    distributed(mt.DataLoader(Dataset(own), 4), check=False)
    np.save(own / "x.npy", np.ones((COUNT, 4), np.float32))
    distributed(mt.DataLoader(Dataset(own), 4))

    def scaled(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {name: value * (1 + here.rank + generator.random()) for name, value in record.items()}

    differ(here, lambda: distributed(mt.DataLoader(Dataset(own, transform=scaled), 4)), told)

    def random(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {name: value * generator.random() for name, value in record.items()}

    distributed(mt.DataLoader(Dataset(own, transform=random), 4))


def test_if_one_rank_passes_a_wrong_value_no_rank_waits(tmp_path: Path) -> None:
    run_ranks(pass_wrong_values_on_one_rank, 2, str(tmp_path))

"""Run random training loops under random parallelisms, for main.py."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence.parallel.models import AXES, CLOSE, apart, joined, layers, parallel
from benchmarks.evidence.support.cases import Fault, Random
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError

Loop = dict[str, Any]
Made = Callable[[Any], torch.optim.Optimizer]
LOSS = nn.functional.mse_loss
OFTEN = (0.1, 0.2, 0.25, 0.45)  # pipelines are drawn most often, because a stage sees the least of the other stages
OPTIMIZERS: dict[str, Made] = {
    "SGD": lambda each: torch.optim.SGD(each, lr=0.05, momentum=0.9),
    "Adam": lambda each: torch.optim.Adam(each, lr=0.01),
    "LARS": lambda each: mt.LARS(each, lr=0.5),
    "LAMB": lambda each: mt.LAMB(each, lr=0.01),
    "LARC": lambda each: mt.LARC(torch.optim.SGD(each, lr=0.05)),
}


def whole(value: Any) -> Tensor:
    """Return the full tensor if ranks hold parts of it."""
    found: Tensor = getattr(value, "full_tensor", lambda: value)()
    return found.detach()


def drawn_loop(random: Random) -> Loop:
    """Draw the features of a loop: a single one, or several together."""
    what = str(random.choice(["accumulation", "clipping", "checkpoint", "together"]))
    together = what == "together"
    return {
        "what": what,
        "optimizer": str(random.choice(list(OPTIMIZERS) if together else ["SGD", "Adam"])),
        "passes": int(random.integers(2, 4)) if what == "accumulation" or (together and random.random() < 0.5) else 1,
        "norm": float(random.choice([1.0, 2.0, float("inf")])),
        "clip": what == "clipping" or (together and random.random() < 0.3),
        "stage_clip": together and random.random() < 0.5,
        "lag": together and random.random() < 0.3,
        "average": together and random.random() < 0.3,
        "limit": float(random.choice([0.01, 0.1, 1.0])),
    }


def loop_case(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a random training loop under a random parallelism; compare with one process."""
    joined()
    loop, axis, ranks = drawn_loop(random), str(random.choice(AXES, p=OFTEN)), dist.get_world_size()
    width = int(random.choice([8, 16]))
    torch.manual_seed(int(random.integers(1 << 30)))
    model = nn.Sequential(
        nn.Linear(width, 256), nn.Tanh(), nn.Linear(256, width), nn.Tanh(), *layers(random, width)
    ).double()
    batches = [(torch.randn(8, width).double(), torch.randn(8, 4).double()) for _ in range(2 * loop["passes"])]
    fresh, one = copy.deepcopy(model), copy.deepcopy(model)
    made = parallel(model, batches[0][0], {axis: ranks})
    if made is None:
        return
    sign = f"{loop['what']}, {axis}"
    try:
        optimizer = OPTIMIZERS[loop["optimizer"]](made.parameters())
        trained(
            loop,
            optimizer,
            made.module,
            list(made.parameters()),
            batches,
            lambda x, y: made.step(*made.share(x, y), LOSS),
        )
    except RuntimeError as error:
        yield Fault(f"{sign}: RuntimeError", f"{loop}: {error}")
        return
    except (ArgumentError, UnsupportedError):
        return  # the error names the feature that multiring does not support
    trained(
        loop,
        OPTIMIZERS[loop["optimizer"]](one.parameters()),
        one,
        list(one.parameters()),
        batches,
        lambda x, y: torch.autograd.backward([LOSS(one(x), y)]),
    )
    truth = dict(one.named_parameters())
    found = {name.removeprefix("module."): whole(each) for name, each in made.module.named_parameters()}
    worst = max((apart(each, truth[name].detach()) for name, each in found.items()), default=0.0)
    if not worst <= CLOSE * 100:
        yield Fault(f"{sign}: weights differ", f"{loop}: by {worst:.1e} of one process")
        return
    if loop["what"] == "checkpoint":
        yield from saved(
            sign, made, (optimizer, OPTIMIZERS[loop["optimizer"]]), (fresh, truth, batches[0][0], {axis: ranks}), folder
        )


def trained(
    loop: Loop, optimizer: Any, model: nn.Module, parameters: list[nn.Parameter], batches: Any, step: Any
) -> None:
    """Run the training loop."""
    group = mt.accumulate(optimizer, loop["passes"]) if loop["passes"] > 1 else None
    lag = mt.gradient_lag(optimizer) if loop["lag"] else None
    average = mt.moving_average(optimizer, model, 0.5) if loop["average"] else None
    if loop["stage_clip"]:
        mt.clip_gradients(optimizer, loop["limit"])
    for inputs, targets in batches:
        with nullcontext(True) if group is None else group as completes:
            step(inputs, targets)
            if completes and loop["clip"]:
                nn.utils.clip_grad_norm_(parameters, loop["limit"], norm_type=loop["norm"])
            optimizer.step()
            optimizer.zero_grad()
    if lag is not None:
        lag.flush()
    if average is not None:
        average.applied().__enter__()


def saved(sign: str, made: Any, optimizers: tuple[Any, Made], case: Any, folder: Path) -> Iterator[Fault]:
    """Save the model; load it into a plain model and into one of the same mesh."""
    optimizer, make = optimizers
    fresh, truth, sample, mesh = case
    again = copy.deepcopy(fresh)
    try:
        mt.save(folder / "last", model=made.module, optimizer=optimizer)
        mt.load(folder / "last", model=fresh)
        second = parallel(again, sample, mesh)
        mt.load(folder / "last", model=second.module, optimizer=make(second.parameters()))
    except (RuntimeError, ArgumentError) as error:
        yield Fault(f"{sign}: {type(error).__name__}", str(error))
        return
    pairs = [(name, each.detach()) for name, each in fresh.named_parameters()]
    pairs += [(name.removeprefix("module."), whole(each)) for name, each in second.module.named_parameters()]
    for name, each in pairs:
        if apart(each, truth[name].detach()) > CLOSE * 100:
            yield Fault(f"{sign}: weights differ", f"{name} after mt.load")
            return


# ---- distribute ----


def optimizers_case(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train with two optimizers on uneven batches, or check the noise scale.

    The noise scale is that of accumulated steps.
    """
    joined()
    yield from two_optimizers(random) if random.random() < 0.6 else noise(random)


def two_optimizers(random: Random) -> Iterator[Fault]:
    """Train a model with two optimizers.

    Each optimizer is given to `distribute`. The loop uses the loader of the second call.
    """
    seed, rows, batch = int(random.integers(1 << 30)), int(random.integers(9, 40)), int(random.integers(2, 9))
    width, passes = int(random.integers(2, 9)), int(random.integers(1, 3))
    at = int(random.integers(1, 3))

    def job(*, is_alone: bool) -> nn.Module:
        torch.manual_seed(seed)
        x, y = torch.randn(rows, width).double(), torch.randn(rows, 3).double()
        model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        data: Any = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)
        halves = [[*model[: 2 * at].parameters()], [*model[2 * at :].parameters()]]
        first: Any = torch.optim.SGD(halves[0], lr=0.1)
        second: Any = torch.optim.Adam(halves[1], lr=0.01)
        if not is_alone:
            _, first, _ = mt.distribute(model, first, data)
            _, second, data = mt.distribute(model, second, data)
        for _ in range(passes):
            for inputs, targets in data:
                first.zero_grad()
                second.zero_grad()
                torch.autograd.backward([LOSS(model(inputs), targets)])
                first.step()
                second.step()
        return model

    one, found = job(is_alone=True), job(is_alone=False)
    worst = max(apart(a.detach(), b.detach()) for a, b in zip(found.parameters(), one.parameters(), strict=True))
    if worst > 1e-7:
        yield Fault("two optimizers: weights differ", f"{rows} rows in batches of {batch}: by {worst:.1e}")


def noise(random: Random) -> Iterator[Fault]:
    """Compare the noise scale of whole batches with that of accumulated micro-batches."""
    seed, parts, small = int(random.integers(1 << 30)), int(random.integers(2, 5)), 2 * int(random.integers(2, 5))
    width, steps = int(random.integers(2, 7)), 10
    found = []
    for batch, count in ((small * parts, 1), (small, parts)):
        torch.manual_seed(seed)
        x = torch.randn(steps * small * parts, width).double()
        y = x.sum(1, keepdim=True) + torch.randn(len(x), 1).double()
        model = nn.Linear(width, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        _, optimizer, loader = mt.distribute(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=batch))
        watch = mt.noise_scale(optimizer, every=1, warns=False)
        group = mt.accumulate(optimizer, count)
        for inputs, targets in loader:
            with group:
                torch.autograd.backward([LOSS(model(inputs), targets) / count])
                optimizer.step()
                optimizer.zero_grad()
        found.append((watch.batch, watch.value))
    (batch_1, value_1), (batch_2, value_2) = found
    if batch_1 != batch_2:
        yield Fault("noise scale: batch of an accumulated step", f"{batch_2} in {parts} parts, and {batch_1} in one")
    # A rank's micro-batches hold other samples than its part of a whole batch, so the values are only similar.
    elif parts == 1 and abs(value_1 - value_2) > 1e-6 * abs(value_1):
        yield Fault("noise scale: of an accumulated step", f"{value_2}, and {value_1} of one batch")

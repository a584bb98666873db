"""Training programs that run alike on host memory and on a device; their losses are compared."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from tests.support import plain
from tests.support.ranks import Here
from torch import Tensor, nn

import multiring.torch as mt

ROWS = 8  # samples of a rank in a batch
HOST = torch.device("cpu")


class Halves:
    """A program's own compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


def join(here: Here, **settings: Any) -> torch.device:
    """Join the job, and return this rank's device."""
    plain.join(here, **settings)
    return torch.device("cuda", torch.cuda.current_device())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (12,)),
    "convolution": (convolution, (1, 4, 4)),
}


def model_of(name: str, device: torch.device) -> nn.Module:
    """Return the model of this name, with the same weights on all ranks and devices."""
    torch.manual_seed(5)
    return MODELS[name][0]().to(device)


def batch(step: int, ranks: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all ranks in a step."""
    dice = torch.Generator().manual_seed(step)
    return torch.randn(ROWS * ranks, *MODELS[name][1], generator=dice), torch.randn(ROWS * ranks, 3, generator=dice)


def own_batch(here: Here, step: int, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of this rank in a step, on `device`."""
    own = slice(here.rank * ROWS, (here.rank + 1) * ROWS)
    inputs, targets = batch(step, here.size, name)
    return inputs[own].to(device), targets[own].to(device)


def mean_loss(model: Callable[[Tensor], Tensor], pair: tuple[Tensor, Tensor]) -> Any:
    """Return the mean of the squared errors."""
    return (model(pair[0]) - pair[1]).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "lars": lambda parameters: mt.LARS(parameters, lr=1.0),
    "lamb": lambda parameters: mt.LAMB(parameters, lr=0.01),
    "muon": lambda parameters: mt.Muon([each for each in parameters if each.dim() > 1], lr=0.02),
    "shampoo": lambda parameters: mt.Shampoo(
        parameters, lr=0.01, eigendecomposition=mt.Eigendecomposition(frequency=3, block=8)
    ),
}


class Program:
    """One training program: a DistributedOptimizer with options, and helpers around its steps.

    Args:
        optimizer: the name of the optimizer.
        passes: backwards of a step.
        helpers: names of helpers: lag, clip, torch clip, scaler, larc, noise, average.
        precision: the type of `mixed_precision`, or "".
        options: further options of DistributedOptimizer.
    """

    def __init__(
        self, optimizer: str = "sgd", *, passes: int = 1, helpers: str = "", precision: str = "", **options: Any
    ) -> None:
        self._optimizer, self._passes, self._options = optimizer, passes, options
        self._helpers, self._precision = helpers.split(", "), precision

    def losses(self, here: Here, device: torch.device, steps: int) -> list[float]:
        """Train for `steps` steps on `device`; return the losses, and what the helpers report."""
        model = model_of("perceptron", device)
        optimizer = mt.DistributedOptimizer(
            OPTIMIZERS[self._optimizer](model.parameters()),
            None if self._optimizer == "muon" else model.named_parameters(),
            backward_passes_per_step=self._passes,
            **self._options,
        )
        has = self._helpers.__contains__
        lag = mt.gradient_lag(optimizer) if has("lag") else None
        precision = mt.mixed_precision(optimizer, self._precision) if self._precision else None
        if has("larc"):
            mt.LARC(optimizer)
        clipping = mt.clip_gradients(optimizer, 0.5) if has("clip") else None
        noise = mt.noise_scale(optimizer, samples=ROWS * self._passes, every=2, warns=False) if has("noise") else None
        average = mt.moving_average(optimizer, model, 0.9) if has("average") else None
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**17, growth_interval=4) if has("scaler") else None
        found: list[Any] = []
        for step in range(steps):
            for part in range(self._passes):
                context: Any = nullcontext() if precision is None else precision.autocast()
                if scaler is not None:
                    context = torch.autocast(device.type, torch.float16)
                with context:
                    loss = mean_loss(model, own_batch(here, step * self._passes + part, "perceptron", device))
                if precision is not None:
                    precision.backward(loss)
                else:
                    scaled: Any = loss if scaler is None else scaler.scale(loss)
                    scaled.backward()
                found.append(loss.detach())
            self._step(model, optimizer, scaler)
            if scaler is not None:
                found.append(scaler.get_scale())
            optimizer.zero_grad()
        if lag is not None:
            lag.flush()
        optimizer.load_state_dict(optimizer.state_dict())
        if average is not None:
            with average.applied():
                found += [each.detach().clone().sum() for each in model.parameters()]
        found += [each.detach().sum() for each in model.parameters()]
        found += [] if clipping is None else [clipping.norm]
        found += [] if noise is None else [noise.value, noise.batch]
        found += [] if precision is None else [precision.scale, precision.skipped]
        return [float(each) for each in found]

    def _step(self, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
        context: Any = nullcontext()
        if "torch clip" in self._helpers:
            if scaler is not None:
                scaler.unscale_(optimizer)
            else:
                optimizer.synchronize()
                context = optimizer.skip_synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with context:
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

"""A user's training script: python train.py MODEL BATCH STEPS [--asleep PROFILE] [--wire TYPE].

It trains one of five models with `multiring.torch.distribute`. With --asleep, a network with the gradients of a profile
sleeps for the times of the profile instead, so that hosts that share cores do not slow each other.
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring._simulator.script_profile import ScriptProfile, script_profile_of

CLASSES = 10


class SleepingGradient(torch.autograd.Function):
    """Does nothing in forward; its backward sleeps until a gradient is ready, and returns ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, seconds: float) -> Tensor:
        """Return `x`."""
        ctx.seconds, ctx.size = seconds, parameter.numel()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of `x` and of the parameter, once this one is ready."""
        time.sleep(ctx.seconds)
        return gradients[0], torch.ones(ctx.size), None


class SleepingNetwork(nn.Module):
    """A network with the gradients of a profile, in their order and at their times."""

    def __init__(self, profile: ScriptProfile) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(each.bytes // 4)) for each in reversed(profile.gradients))
        ready = [each.ready_s for each in profile.gradients]
        gaps = [after - before for before, after in zip([0.0, *ready], ready, strict=False)]
        self.gaps = gaps[::-1]
        self.forward_s = profile.seconds.forward
        self.rest_s = max(0.0, profile.seconds.backward - ready[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of `x` for each class, after the time of forward."""
        time.sleep(self.forward_s)
        x = x.flatten(1).mean(1, keepdim=True).requires_grad_()
        x = SleepingGradient.apply(x, torch.ones(1, requires_grad=True), self.rest_s)  # type: ignore[no-untyped-call] # torch's own
        for parameter, seconds in zip(self.parts, self.gaps, strict=True):
            x = SleepingGradient.apply(x, parameter, seconds)  # type: ignore[no-untyped-call] # torch's own
        return x.expand(-1, CLASSES)


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, CLASSES))


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.Sequential(
        nn.Linear(96, 128), nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(32 * 128, CLASSES)
    )


# Each model with the shape of its input.
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "wide": (lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)), (512,)),
    "deep": (
        lambda: nn.Sequential(
            *[each for _ in range(24) for each in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, CLASSES)
        ),
        (256,),
    ),
    "convolutional": (_convolutional, (3, 32, 32)),
    "attention": (_attention, (32, 96)),
    "late": (
        lambda: nn.Sequential(nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, CLASSES)),
        (4096,),
    ),
}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--asleep", type=Path)
    parser.add_argument("--wire", default="none", help="the type of float32 gradients on the wire between hosts")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    make, shape = MODELS[arguments.model]
    model = make()
    if arguments.asleep is not None:
        model = SleepingNetwork(script_profile_of(arguments.asleep.read_text(encoding="utf-8")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = 4 * arguments.batch
    points = TensorDataset(torch.randn(count, *shape), torch.randint(0, CLASSES, (count,)))
    loader: Any = DataLoader(points, batch_size=arguments.batch)
    model, optimizer, loader = mt.distribute(
        model,
        optimizer,
        loader,
        batch="per_rank",
        learning_rate="keep",
        sharded=True,
        check=False,
        compression=arguments.wire,
    )
    done = 0
    while done < arguments.steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            done += 1
            if done == arguments.steps:
                break
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10} bytes", flush=True)


if __name__ == "__main__":
    main()

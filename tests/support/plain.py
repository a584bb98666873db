"""Models and samples that are equal in every process, for tests against torch."""

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # the first optimizer step would import it in every rank
from tests.support.ranks import Here
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring._frontend.requirements import is_older

FEATURES, CLASSES = 16, 5


def join(here: Here, **settings: Any) -> multiring.Group:
    """Return the group of all ranks; warnings become errors on each rank.

    Each rank computes with one thread.
    """
    gc.freeze()  # else the collection at exit copies every page of torch that the ranks share by fork
    take_warnings_for_errors()
    torch.set_num_threads(1)
    return here.join(**settings)


def take_warnings_for_errors() -> None:
    """Turn warnings into errors, except torch's warnings about itself before 2.7."""
    warnings.simplefilter("error")
    # Many tests give all ranks the same samples. test_torch_first_steps.py tests this warning.
    warnings.filterwarnings("ignore", "DistributedOptimizer: at the first step all")
    if is_older(torch.__version__, "2.7"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def enter(**options: Any) -> None:
    """Join the job like `join`, but with `multiring.torch.init` and its options."""
    gc.freeze()
    take_warnings_for_errors()
    torch.set_num_threads(1)
    mt.init(**options)


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Return the same small convolutional network in every process.

    It has biases, a parameter of one element, and a layer of odd size.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(4 * FEATURES, 7), nn.PReLU(), nn.Linear(7, CLASSES)),
    ).to(dtype)


def samples(seed: int, count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return `count` images of 4 x 4 and their labels, which a network can learn."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(77))
    return images.to(dtype), (images.flatten(1) @ teacher).argmax(1)


def loss_of(model: nn.Module, seed: int, count: int = 6) -> Tensor:
    """Return the mean loss of `model` on `samples(seed, count)`."""
    dtype = next(model.parameters()).dtype
    images, labels = samples(seed, count, dtype)
    loss: Tensor = nn.functional.cross_entropy(model(images).to(torch.promote_types(dtype, torch.float32)), labels)
    return loss


def average_(group: multiring.Group, tensor: Tensor) -> None:
    """Replace `tensor`, of any device, by its average over the ranks, computed by the Group in host memory."""
    values = tensor.cpu().numpy()
    group.all_reduce(values, "average")
    tensor.copy_(torch.from_numpy(values))


def backward(loss: Tensor, **options: Any) -> None:
    """Run `loss.backward()`."""
    loss.backward(**options)  # type: ignore[no-untyped-call] # torch has no type for it


def mean_gradients(make: Callable[[], nn.Module], losses: Sequence[Callable[[nn.Module], Tensor]]) -> list[Tensor]:
    """Return the mean of the losses' gradients.

    Each gradient comes from a plain backward pass of a new model.
    """
    columns = []
    for loss in losses:
        model = make()
        backward(loss(model))
        columns.append([torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()])
    return [torch.stack(column).double().mean(0).to(column[0].dtype) for column in zip(*columns, strict=True)]

"""Train random models under random parallelisms, for main.py."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence.support.cases import Fault, Random
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError

AXES = ("data", "shard", "tensor", "pipeline")
CLOSE = 1e-9
WIDE = 512  # wide enough for ranks to divide or gather the layer


def joined() -> int:
    """Join the jobs of multiring and torch, once; return the rank."""
    if not dist.is_initialized():
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        mt.init()
        dist.init_process_group("multiring")
    return dist.get_rank()


def parallel(model: nn.Module, sample: Any, mesh: Any) -> Any:
    """Return the parallel model, or None if `parallelize` refuses the model by name."""
    with redirect_stdout(StringIO()):
        try:
            return mt.parallelize(model, sample, mesh)
        except (ArgumentError, UnsupportedError):
            return None


def mesh_for(random: Random) -> Any:
    """Draw a mesh for all ranks, sometimes "auto"."""
    ranks = dist.get_world_size()
    if random.random() < 0.25:
        return "auto"
    axis = str(random.choice(AXES))
    if ranks == 4 and random.random() < 0.5:
        return {"data": 2, axis: 2} if axis != "data" else {"data": 4}
    return {axis: ranks}


def apart(found: Tensor, want: Tensor) -> float:
    """Return the relative difference between two tensors."""
    return float((found - want).norm() / want.norm().clamp(min=1e-30))


# ---- models ----


class Oddity(nn.Module):
    """The base of models with an unusual feature and a forward of their own."""

    def __init__(self, inner: nn.Module, width: int, random: Random) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(width, width), inner, nn.Linear(width, 4)
        self.kind = int(random.integers(3))

    def forward(self, given: Tensor) -> Tensor:
        """Return the prediction for a batch."""
        made: Tensor = self.last(torch.tanh(self.inner(torch.tanh(self.first(given)))))
        return made


class Remembering(Oddity):
    """A model that reassigns buffers, changes some in place, and counts its calls.

    The outputs do not depend on the buffers.
    """

    mean: Tensor
    calls: Tensor
    total: Tensor

    def __init__(self, inner: nn.Module, width: int, random: Random) -> None:
        super().__init__(inner, width, random)
        shape = (int(random.integers(1, 5)),)
        self.register_buffer(
            "mean", torch.as_tensor(random.standard_normal(shape)), persistent=bool(random.integers(2))
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        """Update the buffers and return the prediction."""
        if self.kind:
            self.mean = 0.9 * self.mean + 0.1 * given.detach().mean()
        self.calls = self.calls + 1
        self.total += 1
        return super().forward(given)


class Unused(Oddity):
    """A model with parameters that its forward does not use."""

    def __init__(self, inner: nn.Module, width: int, random: Random) -> None:
        super().__init__(inner, width, random)
        self.auxiliary = nn.Linear(width, int(random.integers(1, 9)))
        self.token = nn.Parameter(torch.randn(3))


class Tied(nn.Module):
    """A model that uses one weight through its layer and directly."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        words = 2 * int(random.integers(128, 300))
        self.embedding, self.middle = nn.Embedding(words, WIDE), nn.Linear(WIDE, WIDE)
        self.words = words

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of the words."""
        return nn.functional.linear(torch.tanh(self.middle(self.embedding(words))).mean(1), self.embedding.weight)[
            :, :4
        ]


class Encoder(nn.Module):
    """A module whose callers use `encode` instead of forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 64 * WIDE // width), nn.Linear(64 * WIDE // width, width)
        self.more = nn.ParameterList([nn.Parameter(torch.randn(width, WIDE)), nn.Parameter(torch.randn(WIDE, width))])

    def encode(self, given: Tensor) -> Tensor:
        """Encode a batch."""
        return torch.as_tensor(self.narrow(torch.tanh(self.wide(given))))


class PastForward(Oddity):
    """A model that uses a child without calling the child's forward."""

    def __init__(self, inner: nn.Module, width: int, random: Random) -> None:
        super().__init__(inner, width, random)
        self.encoder = Encoder(width)

    def forward(self, given: Tensor) -> Tensor:
        """Return the prediction for a batch."""
        if self.kind:
            return super().forward(self.encoder.encode(given))
        first, second = self.encoder.more
        return super().forward(torch.tanh(given @ first) @ second * 0.01)


class Keywords(Oddity):
    """A model that calls its layers with keyword arguments."""

    def __init__(self, inner: nn.Module, width: int, random: Random) -> None:
        super().__init__(inner, width, random)
        self.up, self.down = nn.Linear(width, WIDE), nn.Linear(WIDE, width)

    def forward(self, given: Tensor) -> Tensor:
        """Return the prediction for a batch."""
        return super().forward(self.down(input=torch.tanh(self.up(input=given))))


class Several(Oddity):
    """A model with two inputs and two outputs."""

    def forward(self, given: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override] # two of each
        """Return the two predictions for a batch."""
        made = super().forward(given)
        return made, made * more[:, :4]


def layers(
    random: Random, width: int, *, in_place: bool = False, norm: Callable[[int], nn.Module] | None = None
) -> nn.Sequential:
    """Return a random sequence of layers from `width` to 4 features."""
    activations = [nn.ReLU, nn.ELU, nn.LeakyReLU, nn.SiLU] if in_place else [nn.Tanh, nn.GELU, nn.ReLU]
    made: list[nn.Module] = []
    for _ in range(int(random.integers(2, 5))):
        middle = int(random.choice([width, WIDE])) if random.random() < 0.3 else width
        kind = activations[int(random.integers(len(activations)))]
        made += [nn.Linear(width, middle), kind(inplace=True) if in_place else kind()]
        if middle != width:
            made.append(nn.Linear(middle, width))
        if norm is not None or random.random() < 0.3:
            made.append((norm or nn.LayerNorm)(width))
    return nn.Sequential(*made, nn.Linear(width, 4))


ODD: dict[str, Callable[[Random, int], nn.Module]] = {
    "plain": layers,
    "in place": lambda random, width: layers(random, width, in_place=True),
    "batch norm": lambda random, width: layers(random, width, norm=nn.BatchNorm1d),
    "buffers": lambda random, width: Remembering(nn.Linear(width, width), width, random),
    "unused": lambda random, width: Unused(nn.Linear(width, width), width, random),
    "tied": lambda random, _width: Tied(random),
    "past forward": lambda random, width: PastForward(nn.Linear(width, width), width, random),
    "keywords": lambda random, width: Keywords(nn.Linear(width, width), width, random),
    "several": lambda random, width: Several(nn.Linear(width, width), width, random),
}


def loss_of(made: Any, targets: Tensor) -> Tensor:
    """Return the loss of one or several outputs: the sum of their mean squared errors."""
    outputs = made if isinstance(made, tuple) else (made,)
    return torch.stack([nn.functional.mse_loss(each, targets) for each in outputs]).sum()


def model_case(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train a random model under a random mesh; compare three steps with one process."""
    joined()
    kind = str(random.choice(list(ODD)))
    width, batch = int(random.choice([8, 16, 32])), 8 * int(random.integers(1, 4))
    torch.manual_seed(int(random.integers(1 << 30)))
    model = ODD[kind](random, width).double()
    inputs: Any = torch.randn(batch, width).double()
    if kind == "tied":
        inputs = torch.randint(256, (batch, 3))
    if kind == "several":
        inputs = (inputs, torch.randn(batch, width).double())
    targets, mesh = torch.randn(batch, 4).double(), mesh_for(random)
    one, before = copy.deepcopy(model), {name: each.clone() for name, each in model.named_buffers()}
    try:
        made = parallel(model, inputs, mesh)
    except RuntimeError as error:
        yield Fault(f"{kind}: RuntimeError", f"parallelize under {mesh}: {error}")
        return
    if made is None:
        return
    if before and not hasattr(made.parallelism, "axes"):
        return
    plain = getattr(made.module, "module", made.module)
    for name, value in plain.named_buffers():
        if name in before and not torch.equal(value, before[name]):
            yield Fault(f"{kind}: changed by parallelize", f"{mesh}: {name} is {value}, was {before[name]}")
    decay = float(random.choice([0.0, 0.1]))
    yield from _trained(kind, made, one, (inputs, targets), decay)


def _trained(kind: str, made: Any, one: nn.Module, batch: tuple[Any, Tensor], decay: float) -> Iterator[Fault]:
    inputs, targets = batch
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    mine = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    truth = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    for step in range(3):
        mine.zero_grad()
        truth.zero_grad()
        want = loss_of(one(*(each.clone() for each in given)), targets)
        torch.autograd.backward([want])
        *own, labels = made.share(*(each.clone() for each in given), targets)
        try:
            found = made.step(tuple(own), labels, loss_of)
        except RuntimeError as error:
            yield Fault(f"{kind}: RuntimeError", f"step {step} under {made.parallelism}: {error}")
            return
        if not abs(float(found) - float(want.detach())) <= CLOSE * abs(float(want.detach())):
            yield Fault(f"{kind}: losses differ", f"step {step} under {made.parallelism}: {found}, one process {want}")
            return
        mine.step()
        truth.step()


def shared_folder() -> str:
    """Create a folder on rank 0 and return its path on all ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, 0)
    return str(told[0])

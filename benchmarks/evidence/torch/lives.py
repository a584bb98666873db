"""Change models while they train, and compare two ranks with one process.

Layers are frozen, copied, pruned, normalized and widened, and their memory is exchanged.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.evidence.support.cases import Fault, Random
from benchmarks.evidence.torch.gradients import CLOSE, apart, backward, drawn, optimizer_of, ready
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import multiring.torch as mt


class Adapted(nn.Module):
    """A frozen layer with two small trained layers beside it, as in LoRA."""

    def __init__(self, layer: nn.Linear, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths."""
        found: Tensor = self.layer(x) + self.up(self.down(x))
        return found


@dataclass
class Life:
    """A model in training, with its copies and its last snapshot."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    seed: int
    kept: dict[str, Any] = field(default_factory=dict)
    averages: list[nn.Module] = field(default_factory=list)

    def layers(self) -> list[nn.Linear]:
        """Return the linear layers of the model."""
        return [each for each in self.model if isinstance(each, nn.Linear)]


def _freeze(life: Life) -> None:
    for parameter in life.layers()[0].parameters() if len(life.layers()) > 1 else ():
        parameter.requires_grad_(False)


def _thaw(life: Life) -> None:
    for layer in life.layers():
        layer.requires_grad_(True)


def _is_pruned(life: Life) -> bool:
    return any(prune.is_pruned(each) for each in life.model.modules())  # torch cannot copy a pruned module


def _copy(life: Life) -> None:
    if _is_pruned(life):
        return
    life.averages.append(copy.deepcopy(life.model))


def _average(life: Life) -> None:
    if _is_pruned(life):
        return
    if not life.averages or isinstance(life.averages[-1], AveragedModel):
        life.averages.append(copy.deepcopy(life.model))
    with torch.no_grad():
        pairs = zip(life.averages[-1].parameters(), life.model.parameters(), strict=False)
        for kept, new in pairs:
            if kept.shape == new.shape:
                kept.lerp_(new, 0.3)


def _stochastic(life: Life) -> None:
    if _is_pruned(life):
        return
    found = AveragedModel(life.model)
    found.update_parameters(life.model)
    life.averages.append(found)


def _prune(life: Life) -> None:
    if not life.layers() or hasattr(layer := life.layers()[-1], "parametrizations"):
        return
    if not layer.weight.is_contiguous():  # torch cannot prune a layer whose weight is not contiguous
        return
    if prune.is_pruned(layer):
        prune.remove(layer, "weight")  # type: ignore[no-untyped-call] # torch's own
    else:
        prune.l1_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call] # torch's own


def _snapshot(life: Life) -> None:
    if "model" in life.kept and life.kept["model"].keys() == life.model.state_dict().keys():
        life.model.load_state_dict(life.kept["model"])
        life.optimizer.load_state_dict(life.kept["optimizer"])
    life.kept = {
        "model": copy.deepcopy(life.model.state_dict()),
        "optimizer": copy.deepcopy(life.optimizer.state_dict()),
    }


def _adapt(life: Life) -> None:
    _thaw(life)  # with frozen parameters, adding a group would require a new optimizer
    for place, layer in enumerate(life.model):
        if isinstance(layer, nn.Linear) and not prune.is_pruned(layer) and not hasattr(layer, "parametrizations"):
            life.model[place] = adapted = Adapted(layer, life.seed)
            new = [*adapted.down.parameters(), *adapted.up.parameters()]
            life.optimizer.add_param_group({"params": new})
            life.kept = {}
            return


def _clone_data(life: Life) -> None:
    for parameter in life.model.parameters():
        parameter.data = parameter.data.clone()


def _turn_data(life: Life) -> None:
    for parameter in life.model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def _set_data(life: Life) -> None:
    with torch.no_grad():
        for parameter in life.model.parameters():
            other = parameter.detach().clone()
            parameter.set_(other.untyped_storage(), 0, other.shape, other.stride())


def _share(life: Life) -> None:
    life.model.share_memory()


def _there_and_back(life: Life) -> None:
    life.optimizer.zero_grad()
    life.model.double().float()


def _format(life: Life) -> None:
    life.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's own


def _to_none(life: Life) -> None:
    life.model.zero_grad(set_to_none=True)


def _to_zero(life: Life) -> None:
    life.model.zero_grad(set_to_none=False)


EVENTS: dict[str, Callable[[Life], None]] = {
    "freeze": _freeze,
    "thaw": _thaw,
    "copy": _copy,
    "average": _average,
    "stochastic average": _stochastic,
    "prune": _prune,
    "snapshot": _snapshot,
    "adapt": _adapt,
    "data cloned": _clone_data,
    "data turned": _turn_data,
    "data set": _set_data,
    "shared": _share,
    "there and back": _there_and_back,
    "format": _format,
    "to none": _to_none,
    "to zero": _to_zero,
}


@dataclass(frozen=True)
class Plan:
    """The training plan of a case, the same on all ranks and in one process."""

    seed: int
    widths: tuple[int, ...]
    events: tuple[tuple[str, ...], ...]  # the events before each step
    passes: int
    clips: bool
    to_none: bool
    normed: bool
    closes: bool  # whether the optimizer steps with a closure
    makes: Callable[[Any], torch.optim.Optimizer]

    def model(self) -> nn.Sequential:
        """Return the same model at each call."""
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.Tanh()]
        if self.normed:
            parametrizations.weight_norm(layers[0])
        return nn.Sequential(*layers)

    def train(self, those: Any, *, shares: bool) -> Life:
        """Train on the samples of the given ranks; return the model and its copies."""
        model = self.model()
        optimizer = self.makes(model.parameters())
        if shares:
            passes = 1 if self.closes else self.passes
            optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
        life = Life(model, optimizer, self.seed)
        for step, events in enumerate(self.events):
            for event in events:
                EVENTS[event](life)
            self._step(life, step, those)
        return life

    def _step(self, life: Life, step: int, those: Any) -> None:
        def evaluate(turn: int = 0) -> Tensor:
            loss: Tensor = life.model(drawn(self.seed + 31 * step + turn, those, self.widths[0])).square().mean()
            backward(loss / self.passes)
            return loss

        if self.closes:

            def closure() -> Tensor:
                life.optimizer.zero_grad(set_to_none=self.to_none)
                return evaluate()

            life.optimizer.step(closure)  # type: ignore[arg-type] # of a Tensor, as programs have it
            return
        life.optimizer.zero_grad(set_to_none=self.to_none)
        for turn in range(self.passes):
            evaluate(turn)
        if self.clips:
            if self.passes > 1 and hasattr(life.optimizer, "synchronize"):
                life.optimizer.synchronize()
            nn.utils.clip_grad_norm_(life.model.parameters(), 0.2)
        life.optimizer.step()


def planned(random: Random) -> Plan:
    """Draw a random training plan."""
    names = sorted(EVENTS)
    steps, closes = int(random.integers(3, 7)), bool(random.random() < 0.2)
    events = tuple(
        tuple(names[int(each)] for each in random.integers(len(names), size=int(random.integers(3))))
        for _ in range(steps)
    )
    return Plan(
        seed=int(random.integers(1 << 20)),
        widths=tuple(int(each) for each in random.integers(2, 8, int(random.integers(3, 5)))),
        events=events,
        passes=1 if closes else int(random.integers(1, 3)),
        clips=bool(random.integers(2)),
        to_none=bool(random.integers(2)),
        normed=bool(random.integers(2)),
        closes=closes,
        makes=optimizer_of(random),
    )


def lives(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train with a random plan on two ranks and in one process; compare the weights."""
    rank, ranks = ready()
    warnings.simplefilter("ignore")
    plan = planned(random)
    wanted, found = plan.train(range(ranks), shares=False), plan.train([rank], shares=True)
    far = apart(found.model, wanted.model)
    copies = zip(found.averages, wanted.averages, strict=True)
    far = max([far, *(apart(one, other) for one, other in copies)])
    if not far <= CLOSE:
        yield Fault("lives: not one process", f"{plan}: {far:.1e}")
    sums = torch.stack([each.detach().double().sum() for each in found.model.parameters()])
    every = mt.allgather(sums[None])
    if not torch.equal(every[0], every[-1]):
        yield Fault("lives: ranks differ", f"{plan}")

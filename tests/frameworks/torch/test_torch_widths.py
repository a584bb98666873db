"""Learning rates carried to a wider model: what a step changes has one size at all widths."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError

BASE, WIDER, CLASSES = 64, (256, 512), 7


def perceptron(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def convolutional(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, width // 2, 3, padding=1), nn.ReLU()]
    layers += [
        nn.Conv2d(width // 2, width // 2, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(width // 2, width // 2, 2),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width // 2, CLASSES))


class Words(nn.Module):
    """A transformer of three words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.layer = nn.TransformerEncoderLayer(width, width // 16, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.words((x[:, :3].abs() * 20).long().clamp(max=49))).mean(1))
        return found


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "words": Words,
}


def changes(make: Callable[[int], nn.Module], width: int, optimizer: str, *, by_rules: bool) -> dict[str, float]:
    """Return the root mean square by which four steps change the outputs of each layer with weights."""
    model, rate = make(width), 3e-3 if optimizer == "adam" else 0.05
    groups: Any = [{"params": list(model.parameters()), "lr": rate}]
    if by_rules and width > BASE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sixteenfold convolution begins with 16 channels
            groups = mt.carry_to_width(make(BASE), model, lr=rate, optimizer=optimizer)
    kind: Any = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    steps = kind(groups)
    inputs, targets = torch.randn(32, 20), torch.randint(CLASSES, (32,))
    seen: list[dict[str, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | nn.Embedding):
            module.register_forward_hook(lambda _m, _i, found, name=name: seen[-1].update({name: found.detach()}))
    for _ in range(5):
        seen.append({})
        loss = nn.functional.cross_entropy(model(inputs), targets)
        steps.zero_grad()
        torch.autograd.backward(loss)
        steps.step()
    return {name: float((last - seen[0][name]).square().mean().sqrt()) for name, last in seen[-1].items()}


def sizes(*args: Any, by_rules: bool) -> dict[str, float]:
    """Return the mean of `changes` over three seeds."""
    found: list[dict[str, float]] = []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append(changes(*args, by_rules=by_rules))
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_coordinates(name: str, optimizer: str) -> None:
    narrow = sizes(MODELS[name], BASE, optimizer, by_rules=True)
    for width in WIDER:
        for layer, size in sizes(MODELS[name], width, optimizer, by_rules=True).items():
            assert 0.5 < size / narrow[layer] < 2, (width, layer, size, narrow[layer])
    plain = sizes(MODELS[name], WIDER[-1], optimizer, by_rules=False)
    ratios = [plain[layer] / narrow[layer] for layer in plain]
    assert max(ratios) / min(ratios) > 4  # without the rules some layers learn too fast, or others too slowly


# ---- groups ----


def test_groups() -> None:
    narrow, model = Words(64), Words(128)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    groups = mt.carry_to_width(narrow, model, lr=0.1, weight_decay=0.01)
    found = {id(each): group for group in groups for each in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(before)
    settings = {name: found[id(each)] for name, each in model.named_parameters()}
    for name, rate, decay in (
        ("words.weight", 0.1, 0.01),
        ("layer.linear1.weight", 0.05, 0.02),
        ("last.weight", 0.05, 0.02),
        ("last.bias", 0.1, 0.0),
        ("layer.norm1.weight", 0.1, 0.0),
    ):
        assert (settings[name]["lr"], settings[name]["weight_decay"]) == (rate, decay), name
    for name, factor in (("words.weight", 1.0), ("layer.linear1.weight", 0.5**0.5), ("last.weight", 0.5)):
        wanted = narrow.get_parameter(name).square().mean().sqrt() * factor
        assert torch.isclose(model.get_parameter(name).square().mean().sqrt(), wanted), name
    same = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert all(model.get_parameter(name).dim() == 1 for name in same)
    torch.optim.AdamW(groups)


def test_frozen_parameters_are_in_no_group() -> None:
    model = perceptron(128)
    next(iter(model.children())).requires_grad_(requires_grad=False)
    groups = mt.carry_to_width(perceptron(64), model, lr=0.1)
    assert sum(len(group["params"]) for group in groups) == 6


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.last.weight = self.words.weight


class Own(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.places, self.last = nn.Parameter(torch.randn(9, width)), nn.Linear(width, 50)


def zeroed(width: int) -> nn.Module:
    model = perceptron(width)
    if width > BASE:
        nn.init.zeros_(model.get_parameter("6.weight"))
    return model


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (Tied, {}, r"parameters words\.weight and last\.weight are one: .* want two parameters"),
        (Own, {}, r"'places' grows from \(9, 64\) to \(9, 128\) in axis 1 only, .* axes={'places': "),
        (zeroed, {}, r"'6\.weight' is zero, but has values in the narrow model: want both as they are before training"),
        (perceptron, {"lr": -1.0}, "lr=-1.0: want a number"),
        (perceptron, {"weight_decay": None}, "weight_decay=None: want a number"),
        (perceptron, {"optimizer": "muon"}, "optimizer='muon': want 'adam' or 'sgd'"),
    ],
)
def test_bad_models(make: Any, options: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        mt.carry_to_width(make(64), make(128), **{"lr": 0.1, **options})


def test_a_model_on_a_mesh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron(128)
    on_mesh = model.get_parameter("2.weight")
    monkeypatch.setattr("multiring.torch.optim.widths.is_dtensor", lambda each: each is on_mesh)
    with pytest.raises(UnsupportedError, match=r"parameter '2\.weight' is a DTensor: want whole models"):
        mt.carry_to_width(perceptron(64), model, lr=0.1)


def test_axes_of_own_layers() -> None:
    model = Own(128)
    groups = mt.carry_to_width(Own(64), model, lr=0.1, axes={"places": (1, None)})
    rates = {id(each): group["lr"] for group in groups for each in group["params"]}
    assert rates[id(model.places)] == 0.1


def test_doubts_are_told() -> None:
    def heads(width: int) -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(width, 4, width, batch_first=True), nn.Linear(width, 3))

    with pytest.warns(RuntimeWarning, match=r"heads of attention grow from \[16\] to \[32\]"):
        mt.carry_to_width(heads(64), heads(128), lr=0.1)
    with pytest.warns(RuntimeWarning, match="a width of 8 is narrow"):
        mt.carry_to_width(perceptron(8), perceptron(16), lr=0.1)

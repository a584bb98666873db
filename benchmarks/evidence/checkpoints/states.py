"""Compare the states of programs before a save and after a load.

These families of main.py save colliding names, values, optimizers and the states of several ranks. A
loaded value must be equal in value and type. If `save` refuses a value, the error must name the value, and the previous
checkpoint must stay. `torch.save` is no reference here: it returns a non-contiguous array of a foreign byte order in
this machine's byte order.
"""

import copy
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.support.cases import Family, Fault, Random
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError

# In each group, at least two names collide after joining, conversion to text, case folding, Unicode normalization,
# truncation, or use as a path.
MEETING: list[list[Any]] = [
    [1, "1", 1.5, "1.5", (1,), "(1,)", b"1", "b'1'"],
    [True, "True", None, "None", 0, "0", -1, "-1"],
    ["a", "a.b", "a.b.c", "b.c", "a.", ".a", ".", "..", ""],
    ["a/b", "a", "a//b", "/a", "../a", "a\\b", "a\0b", "a\nb", "a b"],
    ["\u00e9", "e\u0301", "E\u0301", "\u00c9", "\ufb01", "fi", "\u212b", "\u00e5", "\ud800", "\udc80"],
    ["weight", "Weight", "WEIGHT", "wei\u011dht", "weight#2", "weight.#2", "__metadata__"],
    ["x" * 300, "x" * 299 + "y", "x" * 200, "x" * 163 + "..." + "x" * 37, "y" + "x" * 300],
    ["$array", "$numpy", "$tuple", "$items", "$dict", "$ordered", "array", "own", "parts"],
]
PARTS = ["a", "A", "\u00e9", "e\u0301", "\ufb01", "fi", "_", "a_b", "beside", "parts", "PARTS", "shared", "x" * 300]


def bits(value: Any) -> Any:
    """Return a comparable form of a value: all its types, shapes and bits, in order."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        memory = plain.as_strided((plain.numel(),), (1,))
        data = memory.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return "tensor", str(value.dtype), tuple(value.shape), data
    if isinstance(value, np.ndarray | np.generic):
        return (
            type(value).__name__ if isinstance(value, np.ndarray) else "scalar",
            value.dtype.str,
            value.shape,
            value.tobytes(),
        )
    if isinstance(value, dict):
        more = getattr(value, "default_factory", None)
        return type(value).__name__, str(more), [(bits(key), bits(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, getattr(value, "maxlen", None), [bits(each) for each in value]
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    return type(value).__name__, repr(value)


def _begin() -> None:
    warnings.simplefilter("ignore")
    if not mt.is_initialized():
        mt.init()


# ---- names that collide ----


def _tree_of(random: Random, names: list[Any], depth: int, counter: Iterator[int]) -> Any:
    picked = [names[each] for each in random.choice(len(names), size=min(len(names), 4), replace=False)]
    tree: dict[Any, Any] = {}
    for key in picked:
        if depth and random.random() < 0.3:
            tree[key] = _tree_of(random, names, depth - 1, counter)
        else:
            number = float(next(counter))
            tree[key] = torch.full((2,), number) if random.random() < 0.7 else np.full(2, number)
    return tree


def names(random: Random, folder: Path) -> Iterator[Fault]:
    """Save values under colliding names: each comes back under its own name."""
    _begin()
    group = MEETING[int(random.integers(len(MEETING)))]
    if random.random() < 0.3:
        group = group + MEETING[int(random.integers(len(MEETING)))]
        group = [
            each for number, each in enumerate(group) if not any(each is one or each == one for one in group[:number])
        ]
    counter = iter(range(1000))
    parts: dict[str, Any] = {"state": _tree_of(random, group, 2, counter)}
    for each in random.choice(len(PARTS), size=3, replace=False):
        parts[PARTS[each]] = torch.full((2,), float(next(counter)))
    own = _tree_of(random, group, 1, counter)
    try:
        mt.save(folder / "c", own=own, **parts)
    except (ArgumentError, MismatchError, UnicodeError) as error:
        if not isinstance(error, ArgumentError):
            yield Fault("names: another error than ArgumentError", repr(error))
        return
    try:
        found = mt.load(folder / "c")
    except Exception as error:  # noqa: BLE001 -- after any error, the saved data is lost
        yield Fault("names: saved, and not loaded", f"{parts}: {error!r}")
        return
    for name, value in (*parts.items(), ("own", own)):
        if bits(found.get(name)) != bits(value):
            yield Fault("names: names meet", f"{name}: saved {value}, loaded {found.get(name)}")
    files = list((folder / "c").rglob("shared.safetensors"))
    stored = [each for file in files for each in load_file(file).values()]
    wanted = sum(1 for name in parts for _ in _arrays_in(parts[name]))
    if len(stored) != wanted:
        yield Fault("names: the package safetensors reads other arrays", f"{len(stored)}, and not {wanted}")


def _arrays_in(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for each in tree.values():
            yield from _arrays_in(each)
    else:
        yield tree


# ---- values that programs have ----

Point = namedtuple("Point", "x y")  # noqa: PYI024 -- programs use such tuples


@dataclass
class Record:
    """A dataclass, as programs have it in their state."""

    step: int


class Strange(torch.Tensor):
    """A program's own subclass of Tensor."""


def _tensor(random: Random) -> torch.Tensor:
    base = torch.from_numpy(random.normal(size=(4, 6)).astype(np.float32))
    kinds = ["float64", "bfloat16", "float16", "complex64", "complex128", "int64", "uint8", "bool", "float32", "uint16"]
    kinds += ["float8_e4m3fn", "float8_e5m2", "int16", "uint32", "uint64", "complex32"]
    tensor = base.to(getattr(torch, kinds[int(random.integers(len(kinds)))]))
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda each: each,
        lambda each: each.t(),
        lambda each: each[1:, ::2],
        lambda each: each[0, 0],
        lambda each: each[:0],
        lambda each: each[:1].expand(3, 6),
        lambda each: each.conj() if each.is_complex() and each.dtype != torch.complex32 else each,
        lambda each: each.flatten()[3:7],
    ]
    return views[int(random.integers(len(views)))](tensor)


def _array(random: Random) -> Any:
    kinds = ["?", "b", ">i2", "<u4", ">f4", "f2", "f8", ">c16", "U3", "S2", "M8[ns]", "m8[s]"]
    array: Any = random.integers(0, 9, (2, 3)).astype(kinds[int(random.integers(len(kinds)))])
    views: list[Callable[[Any], Any]] = [
        lambda each: each,
        lambda each: each.T,
        lambda each: each[::-1, 1:],
        lambda each: each[0, 0],
        lambda each: each[:0],
        np.asfortranarray,
        lambda each: np.array(each[0, 0]),
    ]
    return views[int(random.integers(len(views)))](array)


def _plain(random: Random) -> Any:
    (odd,) = struct.unpack("<d", random.bytes(8))
    values = [
        None,
        True,
        3,
        -(1 << 63),
        1 << 90,
        1.5,
        -0.0,
        math.inf,
        odd,
        "text",
        "\ud800",
        b"\0a",
        1j,
        complex(odd, 1),
    ]
    values += [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), (1, (2,)), [], {}, ()]
    return values[int(random.integers(len(values)))]


def _refused(random: Random) -> Any:
    """Return a random value of a kind that `save` may refuse."""
    values: list[Callable[[], Any]] = [
        lambda: {1, 2},
        lambda: Point(1, 2),
        lambda: Record(3),
        lambda: np.array([{}, 1], object),
        lambda: torch.ones(2).as_subclass(Strange),
        lambda: torch.eye(2).to_sparse(),
        lambda: range(3),
        lambda: Path("x"),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        torch.Generator,
        lambda: lambda: 1,
        lambda: np.longdouble(1),
        lambda: frozenset({1}),
        lambda: bytearray(b"a"),
        lambda: 3 + Counter(a=1)["a"],
    ]
    return values[int(random.integers(len(values)))]()


def _state(random: Random, depth: int, *, odd: float) -> Any:
    draw = random.random()
    if depth and draw < 0.6:
        inner = [_state(random, depth - 1, odd=odd) for _ in range(int(random.integers(0, 4)))]
        group = MEETING[int(random.integers(len(MEETING)))]
        keys = [group[each] for each in random.choice(len(group), size=len(inner), replace=False)]
        pairs = list(zip(keys, inner, strict=True))
        made: list[Callable[[], Any]] = [
            lambda: inner,
            lambda: tuple(inner),
            lambda: dict(pairs),
            lambda: OrderedDict(pairs),
            lambda: defaultdict(list, pairs),
            lambda: deque(inner, 9),
        ]
        return made[int(random.integers(len(made)))]()
    if random.random() < odd:
        return _refused(random)
    made = [lambda: _tensor(random), lambda: _array(random), lambda: _plain(random)]
    return made[int(random.integers(len(made)))]()


def states(random: Random, folder: Path) -> Iterator[Fault]:
    """Save a random state: it comes back bit for bit, or `save` refuses it.

    If `save` refuses the state, the previous checkpoint must still load.
    """
    _begin()
    path = folder / "c"
    mt.save(path, good=torch.ones(3))
    value = [_state(random, 3, odd=0.03) for _ in range(4)]
    wanted = bits(value)
    try:
        mt.save(path, value=value)
    except ArgumentError as error:
        if "value" not in str(error):
            yield Fault("states: a refusal without a name", str(error))
        if not torch.equal(mt.load(path)["good"], torch.ones(3)):
            yield Fault("states: a refusal loses the last checkpoint", str(error))
        return
    except Exception as error:  # noqa: BLE001 -- it should have been an ArgumentError
        yield Fault("states: another error than ArgumentError", f"{error!r} of {value}"[-500:])
        return
    try:
        found = bits(mt.load(path)["value"])
    except Exception as error:  # noqa: BLE001 -- after any error, the saved data is lost
        yield Fault("states: saved, and not loaded", f"{error!r} of {value}"[-500:])
        return
    if found != wanted:
        yield Fault("states: changed", f"saved {wanted}, loaded {found}"[-500:])


# ---- models, optimizers, schedulers ----


class Model(nn.Module):
    """A model with tied weights, a frozen parameter, buffers and extra state.

    One buffer is persistent and one is not. One parameter is not contiguous, and one is a scalar.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.second = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.third = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.third.weight = self.second.weight
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=dtype).t())
        self.frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("dropped", torch.randn(2), persistent=False)
        self.seen = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one output row for each input row."""
        self.seen += 1
        found: torch.Tensor = (
            self.third(torch.tanh(self.second(self.norm(self.first(rows))))) @ self.turned * self.scalar
        )
        return found

    def get_extra_state(self) -> Any:
        """Return the number of forward calls so far."""
        return {"seen": self.seen, "by": torch.tensor(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        """Restore the number of forward calls."""
        self.seen = int(state["by"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True, capturable=False, maximize=True),
    "AdamW": torch.optim.AdamW,
    "tensor rate": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "LBFGS": lambda groups: torch.optim.LBFGS(  # LBFGS takes only contiguous gradients
        [each for group in groups for each in group["params"] if each.is_contiguous()], max_iter=2
    ),
    "LARS": lambda groups: mt.LARS(groups, lr=0.1),
    "LAMB": lambda groups: mt.LAMB(groups, lr=0.1),
}
SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30, cycle_momentum=False),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
]


class Training:
    """A model with an optimizer, a scheduler, a loss scale and an averaged model."""

    def __init__(self, seed: int, name: str, scheduler: int, *, doubles: bool) -> None:
        torch.manual_seed(seed)
        self.model = Model(torch.float64 if doubles else torch.float32)
        some = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = OPTIMIZERS[name]([{"params": some[:2]}, {"params": some[2:], "lr": 0.02}])
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        self.scale = torch.amp.GradScaler("cpu")

    def parts(self) -> dict[str, Any]:
        """Return the parts that have a state, by name."""
        return vars(self)

    def steps(self, count: int, seed: int) -> None:
        """Train for `count` steps on batches drawn from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            rows = torch.randn(6, 5, generator=generator).to(self.model.first.weight.dtype)

            def loss() -> torch.Tensor:
                self.optimizer.zero_grad()
                found: torch.Tensor = self.model(rows).square().mean()  # noqa: B023 -- called at once
                found.backward()  # type: ignore[no-untyped-call]
                return found

            value = self.optimizer.step(loss)  # type: ignore[arg-type]
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(float(value)) if plateau else self.scheduler.step()
        self.average.update_parameters(nn.Linear(2, 2))


def trainings(random: Random, folder: Path) -> Iterator[Fault]:
    """Save a training and load it into another one.

    After further steps, both trainings must still be equal bit for bit.
    """
    _begin()
    name = list(OPTIMIZERS)[int(random.integers(len(OPTIMIZERS)))]
    scheduler, doubles = int(random.integers(len(SCHEDULERS))), bool(random.integers(2))
    if name in {"LBFGS", "tensor rate"}:
        scheduler = 0
    seed, count = int(random.integers(1 << 30)), int(random.integers(0, 4))
    one, other = (Training(each, name, scheduler, doubles=doubles) for each in (seed, seed + 1))
    other.steps(int(random.integers(0, 2)), seed)
    one.steps(count, seed)
    what = f"{name}, scheduler {scheduler}, doubles {doubles}, {count} steps"
    wanted = {key: copy.deepcopy(bits_of_part(each)) for key, each in one.parts().items()}
    mt.save(folder / "c", **one.parts())
    mt.load(folder / "c", **other.parts())
    for key, each in other.parts().items():
        if bits_of_part(each) != wanted[key]:
            text = f"{what}: {key}: saved {wanted[key]}, loaded {bits_of_part(each)}"
            yield Fault(f"trainings: another {key}", text[-1200:])
    if not torch.equal(*(each.model.get_buffer("dropped") for each in (one, other))):
        yield Fault("trainings: a buffer that is not persistent", what)
    one.steps(2, 5)
    other.steps(2, 5)
    if bits_of_part(one.model) != bits_of_part(other.model):
        yield Fault("trainings: they go on differently", what)


def bits_of_part(part: Any) -> Any:
    """Return the comparable form of a part's `state_dict`."""
    state = part.state_dict()
    return bits(dict(sorted(state.items(), key=lambda each: str(each[0]))))


# ---- on several ranks ----


def ranks(random: Random, folder: Path) -> Iterator[Fault]:
    """Save on all ranks: shared values come from rank 0, own values from each rank.

    If one rank cannot save, all ranks must raise.
    """
    _begin()
    path = folder / "c"
    rank, size = mt.rank(), mt.size()
    seed = int(random.integers(1 << 30))
    value = [_state(np.random.default_rng(seed), 2, odd=0) for _ in range(3)]
    mine = [_state(np.random.default_rng((seed, rank)), 2, odd=0) for _ in range(3)]
    mt.save(path, value=value, own=mine)
    odd = int(random.integers(size))
    try:
        mt.save(path, value=1, own={1, 2} if rank == odd else 3)
        yield Fault("ranks: one rank's refusal is not told", f"rank {rank} of {size}, rank {odd} has a set")
    except (ArgumentError, MismatchError) as error:
        wanted = ArgumentError if rank == odd else MismatchError
        if not isinstance(error, wanted) or "set" not in str(error):
            yield Fault("ranks: another error than the refusing rank's", repr(error))
    found = mt.load(path)
    if bits(found["value"]) != bits(value):
        yield Fault("ranks: what is shared changed", f"rank {rank}")
    if bits(found["own"]) != bits(mine):
        yield Fault("ranks: what is own changed", f"rank {rank}")


FAMILIES = [
    Family(name="names", run=names),
    Family(name="states", run=states),
    Family(name="trainings", run=trainings),
    Family(name="two ranks", run=ranks, ranks=2),
    Family(name="three ranks", run=ranks, ranks=3),
]

"""Test unusual uses of torch on two ranks.

    python benchmarks/evidence/torch/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--again]
        [--against CHECKOUT]

The families run random programs and compare them with one process or with plain arithmetic. They cover changes to
gradients and their memory, callbacks that wait, compiled functions, the state of modules, odd structures, and the
training of two networks. benchmarks/evidence/support/cases.py explains how families take turns.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.cases import Family, Fault, Random, Topic, main
from benchmarks.evidence.torch.calls import calls
from benchmarks.evidence.torch.gradients import CLOSE, apart, backward, drawn, lag, memory, network, ready
from benchmarks.evidence.torch.hooks import futures, hooks, threads
from benchmarks.evidence.torch.lives import lives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt
from multiring._frontend.errors import LoopOrderError
from multiring.errors import MultiringError

# ---- compiled functions ----


def compiled_model(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train a compiled DistributedDataParallel model and an uncompiled one.

    Both must get the same weights.
    """
    rank, _ = ready()
    make, features = network(random)
    seed = int(random.integers(1 << 20))
    models = make(), make()
    for number, model in enumerate(models):
        wrapped: Any = DistributedDataParallel(model)
        torch._dynamo.reset()  # noqa: SLF001 -- torch's name
        called = torch.compile(wrapped, backend="eager") if number else wrapped
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            for step in range(3):
                optimizer.zero_grad()
                backward(called(drawn(seed + step, [rank], features)).square().mean())
                optimizer.step()
        except Exception as error:  # noqa: BLE001 -- the compiler's are of many kinds
            yield Fault(f"compiled DDP: {type(error).__name__}", str(error))
            return
    if apart(*models) > CLOSE:
        yield Fault("compiled DDP: other weights", f"{apart(*models):.1e}")


def _reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _sent(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x


def _met(x: Tensor) -> Tensor:
    dist.barrier()
    return x


def _waited(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


COMPILED: list[Callable[[Tensor], Tensor]] = [
    mt.allreduce,
    lambda x: mt.allgather(x)[: len(x)],
    lambda x: mt.broadcast(x, 0),
    lambda x: mt.synchronize(mt.allreduce_async(x)),
    lambda x: mt.grouped_allreduce([x, x])[1],
    _reduced,
    _sent,
    _met,
    _waited,
]


def compiled_calls(random: Random, _folder: Path) -> Iterator[Fault]:
    """Compare a compiled function of some collectives with the uncompiled function."""
    rank, _ = ready()
    shape = tuple(int(each) for each in random.integers(1, 5, int(random.integers(1, 3))))

    chosen = [COMPILED[int(each)] for each in random.integers(len(COMPILED), size=int(random.integers(1, 4)))]

    def function(x: Tensor, turns: int) -> Tensor:
        for number in range(turns):
            if number % 2:
                x = x.abs() + 1
            x = chosen[number % len(chosen)](x * (number + 2)) + 1
        return x.cumsum(0)

    torch._dynamo.reset()  # noqa: SLF001 -- torch's name
    compiled = torch.compile(function, backend="eager", dynamic=bool(random.integers(2)))
    inner = torch.compile(compiled, backend="eager") if random.random() < 0.3 else compiled
    for more in range(3):  # repeat the call with other shapes and numbers of turns
        whole = (shape[0] + more, *shape[1:])
        start = torch.arange(1.0, 1 + float(np.prod(whole))).view(whole) * (rank + 1)
        wanted = function(start.clone(), 1 + more)
        try:
            found = inner(start.clone(), 1 + more)
        except Exception as error:  # noqa: BLE001 -- the compiler's are of many kinds
            yield Fault(f"compiled calls: {type(error).__name__}", str(error))
            return
        if not torch.equal(found, wanted):
            yield Fault("compiled calls: other numbers", f"{found} for {wanted}")


# ---- state ----


class Odd(nn.Module):
    """A module with buffers of random types, and possibly state that is no tensor."""

    def __init__(self, random: Random, mine: int) -> None:
        super().__init__()
        self.rest = nn.Linear(2, 2)
        self.kept: list[str] = []
        kinds = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16]
        for number in range(int(random.integers(1, 4))):
            shape = tuple(int(each) for each in random.integers(0, 4, int(random.integers(0, 3))))
            value = torch.full(shape, mine + number).to(kinds[int(random.integers(len(kinds)))])
            self.register_buffer(f"b{number}", value, persistent=bool(random.integers(2)))
        self.form = ("none", "tensor", "dict", "list")[int(random.integers(4))]
        self.extra = mine
        if self.form == "none":  # torch looks the method up in the class, so the instance changes its class
            self.__class__ = Plain

    def get_extra_state(self) -> Any:
        """Return the extra state as a tensor, a dict or a list."""
        return {"tensor": torch.tensor(self.extra), "dict": {"x": self.extra}, "list": [self.extra]}[self.form]

    def set_extra_state(self, state: Any) -> None:
        """Restore the extra state."""
        self.extra = int(state["x"] if self.form == "dict" else state[0] if self.form == "list" else state)


class Plain(Odd):
    """The same module without extra state."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def state(random: Random, _folder: Path) -> Iterator[Fault]:
    """Copy rank 0's module to all ranks, with `distribute` or `elastic`."""
    rank, _ = ready()
    entropy, way = int(random.integers(1 << 30)), ("distribute", "elastic")[int(random.integers(2))]
    module, wanted = (Odd(np.random.default_rng(entropy), mine) for mine in (rank, 0))
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2))
    sign = "extra" if module.form != "none" else "buffer"
    try:
        if way == "elastic":
            mt.elastic.TorchState(module).sync()
        else:
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            mt.distribute(module, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    except (MultiringError, RuntimeError) as error:
        yield Fault(f"state: {sign} is refused by {way}", str(error))
        return
    for name, buffer in wanted.named_buffers():
        if not torch.equal(module.get_buffer(name), buffer):
            yield Fault(f"state: buffer by {way}", f"{name} of {buffer.dtype}: {module.get_buffer(name)} on {rank}")
    if module.form != "none" and module.extra != wanted.extra:
        yield Fault(f"state: extra by {way}", f"{module.form}: {module.extra} on rank {rank}")


def structure(source: Random, own: int, order: Random, depth: int, number: int = 1) -> Any:
    """Return the structure that `source` draws, with one rank's contents.

    The rank's `order` decides the order of the dictionaries' names.
    """
    kind = int(source.integers(4 if depth else 2)) if number > 1 else 3
    if kind == 0:
        return torch.arange(float(own + 1)).add(100 * number + 10 * own)
    if kind == 1:
        return [f"{number}-{own}"] * (own + 1)
    count = int(source.integers(2, 5))
    each = [structure(source, own, order, depth - 1, 10 * number + place) for place in range(count)]
    if kind == 2:
        return tuple(each)
    return {f"n{place}": each[place] for place in order.permutation(count).tolist()}


def joined(parts: list[Any]) -> Any:
    """Return the structures of all ranks concatenated into one."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts).tolist()
    if isinstance(parts[0], list):
        return [each for part in parts for each in part]
    if isinstance(parts[0], tuple):
        return tuple(joined(list(each)) for each in zip(*parts, strict=True))
    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def gather(random: Random, _folder: Path) -> Iterator[Fault]:
    """Gather odd structures whose dictionaries have another order on each rank."""
    rank, ranks = ready()
    entropy = int(random.integers(1 << 30))
    drawn_for = [
        structure(np.random.default_rng(entropy), each, np.random.default_rng((entropy, each)), 2)
        for each in range(ranks)
    ]
    wanted = joined(drawn_for)
    try:
        found = joined([mt.gather(drawn_for[rank])])
    except (MultiringError, RuntimeError) as error:
        yield Fault("gather: refused", str(error))
        return
    if found != wanted:
        yield Fault("gather: under another name", f"{found} for {wanted}")


# ---- numbers and loops ----


def complex_parameters(random: Random, _folder: Path) -> Iterator[Fault]:
    """Step on complex parameters: LAMB must match AdamW, and Muon must refuse them."""
    shape = tuple(int(each) for each in random.integers(1, 4, 2))
    kind = (torch.complex64, torch.complex128)[int(random.integers(2))]
    torch.manual_seed(int(random.integers(1 << 30)))
    start = torch.randn(shape, dtype=kind)
    own, peer = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options: dict[str, Any] = {"lr": float(random.uniform(0.01, 0.2)), "weight_decay": 0.0}
    ours = mt.LAMB([own], **options)
    ours.param_groups[0].update(trust_ratio=False, eps=1e-8, betas=(0.9, 0.999))
    theirs = torch.optim.AdamW([peer], **options)
    for _ in range(3):
        own.grad = torch.randn(shape, dtype=kind)
        peer.grad = own.grad.clone()
        ours.step()
        theirs.step()
    if not torch.allclose(own, peer, atol=1e-4):
        yield Fault("complex: LAMB", f"{own} for {peer}")
    try:
        matrix = nn.Parameter(start.clone())
        muon = mt.Muon([matrix])
        matrix.grad = torch.randn(shape, dtype=kind) * 1j
        muon.step()
    except MultiringError as error:
        if "complex" not in str(error):
            yield Fault("complex: another refusal", str(error))
    else:
        yield Fault("complex: Muon", "took a complex matrix without a word")


@dataclass(frozen=True, slots=True)
class Game:
    """A loop that trains a maker and a judge, one through the other."""

    seed: int
    width: int
    rate: float
    passes: int  # the number of backward passes per step of the judge
    makes_first: bool

    def play(self, those: Any, *, shares: bool, freezes: bool) -> list[nn.Module]:
        """Train on the samples of these ranks; return the two networks."""
        torch.manual_seed(self.seed)
        maker = nn.Linear(3, self.width)
        judge = nn.Sequential(nn.Linear(self.width, 4), nn.Tanh(), nn.Linear(4, 1))
        for_maker, for_judge = (torch.optim.SGD(each.parameters(), self.rate) for each in (maker, judge))
        if shares:
            for_maker = mt.DistributedOptimizer(for_maker, maker.named_parameters())
            passes = self.passes if freezes else 1
            for_judge = mt.DistributedOptimizer(for_judge, judge.named_parameters(), backward_passes_per_step=passes)
        for turn in range(6):
            noise, true = drawn(self.seed + turn, those, 3), drawn(self.seed + 50 + turn, those, self.width)
            if turn % 2 == int(self.makes_first):
                self._judge(maker, judge, for_judge, (noise, true))
                continue
            judge.requires_grad_(not freezes)
            for_maker.zero_grad()
            backward(judge(maker(noise)).square().mean())
            for_maker.step()
            judge.requires_grad_(True)
        return [maker, judge]

    def _judge(
        self, maker: nn.Module, judge: nn.Module, optimizer: torch.optim.Optimizer, samples: tuple[Tensor, Tensor]
    ) -> None:
        noise, true = samples
        optimizer.zero_grad()
        losses = (judge(true) - 1).square().mean(), judge(maker(noise).detach()).square().mean()
        for loss in losses if self.passes == 2 else (losses[0] + losses[1],):
            backward(loss)
        optimizer.step()


def two_networks(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train two networks, one through the other.

    If multiring refuses the loop, the advice in the error must work.
    """
    rank, ranks = ready()
    game = Game(
        seed=int(random.integers(1 << 20)),
        width=int(random.integers(2, 8)),
        rate=float(random.uniform(0.02, 0.2)),
        passes=int(random.integers(1, 3)),
        makes_first=bool(random.integers(2)),
    )
    wanted = game.play(range(ranks), shares=False, freezes=False)
    try:
        found = game.play([rank], shares=True, freezes=False)
    except LoopOrderError as error:
        if "requires_grad_(False)" not in str(error):
            yield Fault("two networks: advice that does not help", str(error))
            return
        found = game.play([rank], shares=True, freezes=True)
    far = max(apart(one, other) for one, other in zip(found, wanted, strict=True))
    if far > CLOSE:
        yield Fault("two networks: not one process", f"{game}: {far:.1e}")


FAMILIES = (
    Family(name="memory", run=memory, ranks=2, aims=("bug_23_grad_data_assigned.py",)),
    Family(name="lag", run=lag, ranks=2, aims=("reader_02.py",)),
    Family(name="state", run=state, ranks=2, aims=("torch_10.py", "torch_11.py")),
    Family(name="gather", run=gather, ranks=2, aims=("torch_13.py",)),
    Family(name="complex", run=complex_parameters, aims=("reader_10.py",)),
    Family(name="two networks", run=two_networks, ranks=2, aims=("bug_01_gan_two_optimizers.py",)),
    Family(name="compiled DDP", run=compiled_model, ranks=2, aims=("bug_20_compile_ddp.py",)),
    Family(name="compiled calls", run=compiled_calls, ranks=2, aims=("bug_37_compile_regions.py",)),
    Family(name="hooks", run=hooks, ranks=2, deadline_s=30.0, aims=("bug_19_powersgd_hang.py",)),
    Family(name="futures", run=futures, ranks=2, deadline_s=30.0, aims=("bug_19b_callback_waits.py",)),
    Family(name="lives", run=lives, ranks=2, case_s=0.3, aims=("bug_23_grad_data_assigned.py",)),
    Family(name="threads", run=threads, ranks=2, deadline_s=30.0, aims=("bug_19_powersgd_hang.py",)),
    Family(name="calls", run=calls, ranks=2, deadline_s=30.0, case_s=0.2),
)
TOPIC = Topic(
    name="torch",
    program="evidence/torch/main.py",
    families=FAMILIES,
    shows={
        "bug_01_gan_two_optimizers.py": ["two networks: advice that does not help"],
        "bug_19_powersgd_hang.py": ["hooks: hang", "threads: hang"],
        "bug_19b_callback_waits.py": ["futures: hang"],
        "bug_20_compile_ddp.py": ["compiled DDP:"],
        "bug_23_grad_data_assigned.py": ["memory: not one process", "lives: not one process"],
        "bug_37_compile_regions.py": ["compiled calls:"],
        "reader_02.py": ["lag: another gradient is applied"],
        "reader_10.py": ["complex: LAMB", "complex: Muon"],
        "torch_10.py": ["state: buffer by distribute"],
        "torch_11.py": ["state: extra by distribute", "state: extra by elastic", "state: extra is refused by elastic"],
        "torch_13.py": ["gather: under another name"],
    },
)

if __name__ == "__main__":
    sys.exit(main(TOPIC))

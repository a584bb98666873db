"""Test callbacks that wait, communication hooks and threads, compared with Gloo.

These families belong to benchmarks/evidence/torch/main.py.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence.support.cases import Fault, Random
from benchmarks.evidence.torch.gradients import CLOSE, apart, backward, drawn, network, ready
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # the type stubs of torch.distributed leave GradBucket out
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt


def futures(random: Random, _folder: Path) -> Iterator[Fault]:
    """Wait for collectives in callbacks of other collectives, or chain the callbacks."""
    rank, ranks = ready()
    depth, size = (int(random.integers(1, most)) for most in (5, 50_000))
    waits = bool(random.integers(2))

    def level(left: int) -> Any:
        tensor = torch.full((size,), float(rank + left))
        future = dist.all_reduce(tensor, async_op=True).get_future()
        if not left:
            return future
        if waits:
            return future.then(lambda found: [found.value()[0][:1] + level(left - 1).wait()[0][:1]])
        return future.then(lambda found: [found.value()[0][:1]]).then(
            lambda found: [found.value()[0] + level(left - 1).then(lambda last: last.value()[0][:1]).wait()]
        )

    wanted = sum(rank + left for left in range(depth + 1) for rank in range(ranks))
    # A case has one chain of callbacks. With several, the ranks would start the collectives in different orders.
    found = float(level(depth).wait()[0].reshape(-1)[0])
    if found != wanted:
        yield Fault("futures: another sum", f"depth {depth}: {found}, want {wanted}")


@cache
def gloo() -> Any:
    """Return a Gloo group of all ranks."""
    ready()
    return dist.new_group(backend="gloo")


# ---- hooks ----

Registers = Callable[[DistributedDataParallel, Any], None]


def _power(wrapped: DistributedDataParallel, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _fp16_power(wrapped: DistributedDataParallel, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))


def _post_local(wrapped: DistributedDataParallel, group: Any) -> None:
    untyped: Any = post_localSGD_hook
    state = untyped.PostLocalSGDState(group, subgroup=group, start_localSGD_iter=2)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def _plain(wrapped: DistributedDataParallel, group: Any) -> None:
    wrapped.register_comm_hook(group, default_hooks.allreduce_hook)


def _fp16(wrapped: DistributedDataParallel, group: Any) -> None:
    wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)


def _clipping(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Clip by the norm of all ranks' gradients, then sum them, as user programs do."""
    buffer = bucket.buffer()
    norm = buffer.square().sum()[None]
    dist.all_reduce(norm, group=group)
    work = dist.all_reduce(buffer.div_(2 * (1 + norm.sqrt())), group=group, async_op=True)
    assert work is not None
    ended: Future[Tensor] = work.get_future().then(lambda found: found.value()[0])
    return ended


def _gathering(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Gather and average the parts in a callback that waits for another collective."""
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, buffer, group=group, async_op=True)
    assert work is not None

    def add(_: Any) -> Tensor:
        total = torch.stack(parts).mean(0)
        dist.broadcast(total, 0, group=group)
        return total

    ended: Future[Tensor] = work.get_future().then(add)
    return ended


def _own(hook: Any, wrapped: DistributedDataParallel, group: Any) -> None:
    wrapped.register_comm_hook(group, hook)


# A hook whose callbacks call collectives uses one bucket. With several buckets, the ranks would start the collectives
# in different orders. The hook batched_powerSGD_hook is left out: it fails before it calls any collective.
ONE_BUCKET: dict[str, Registers] = {
    "power": _power,
    "power in fp16": _fp16_power,
    "gathering": partial(_own, _gathering),
}
SEVERAL: dict[str, Registers] = {
    "plain": _plain,
    "fp16": _fp16,
    "post-local": _post_local,
    "clipping": partial(_own, _clipping),
    "none": lambda _wrapped, _group: None,
}


def trained(model: nn.Module, group: Any, register: Registers, *, seed: int, features: int, **options: Any) -> None:
    """Train `model` for some steps on this rank's samples."""
    rank, _ = ready()
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    register(wrapped, group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(5):
        optimizer.zero_grad()
        backward(wrapped(drawn(seed + step, [rank], features)).square().mean())
        optimizer.step()


def hooks(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train with communication hooks of torch and of programs; compare with Gloo.

    Some hooks use one bucket, others several.
    """
    ready()
    make, features = network(random)
    known = {**ONE_BUCKET, **SEVERAL}
    name = sorted(known)[int(random.integers(len(known)))]
    size_mb = 25.0 if name in ONE_BUCKET else float(random.choice([1e-5, 2e-4, 25.0]))
    options = {"bucket_cap_mb": size_mb, "gradient_as_bucket_view": bool(random.integers(2))}
    seed = int(random.integers(1 << 20))
    ours, theirs = make(), make()
    trained(ours, dist.group.WORLD, known[name], seed=seed, features=features, **options)
    sums = mt.allgather(torch.stack([each.detach().double().sum() for each in ours.parameters()])[None])
    if name != "post-local" and not torch.equal(sums[0], sums[1]):
        yield Fault("hooks: ranks differ", f"{name}, {options}")
    try:
        trained(theirs, gloo(), known[name], seed=seed, features=features, **options)
    except RuntimeError:  # Gloo itself fails in this case, so there is nothing to compare
        return
    far, most = apart(ours, theirs), 1e-3 if "fp16" in name else CLOSE
    if not far <= most:
        yield Fault("hooks: not as Gloo", f"{name}, {options}: {far:.1e}")


# ---- threads ----


@cache
def of_threads() -> list[Any]:
    """Return a group for each thread."""
    ready()
    return [dist.new_group(list(range(dist.get_world_size()))) for _ in range(3)]


def threads(random: Random, _folder: Path) -> Iterator[Fault]:
    """Train several models at once, each in its own thread and group.

    The weights must be those of training one after the other.
    """
    ready()
    made = [network(random) for _ in range(int(random.integers(2, 4)))]
    seed, failures = int(random.integers(1 << 20)), []
    at_once = [make() for make, _ in made]
    alone = [copy.deepcopy(each) for each in at_once]
    groups = of_threads()

    def run(models: list[nn.Sequential], number: int) -> None:
        try:
            register: Registers = _power if number == 0 else _plain
            trained(models[number], groups[number], register, seed=seed, features=made[number][1])
        except Exception as error:  # noqa: BLE001 -- told below
            failures.append(repr(error))

    running = [threading.Thread(target=run, args=(at_once, number)) for number in range(len(made))]
    for each in running:
        each.start()
    for each in running:
        each.join()
    for number in range(len(made)):
        run(alone, number)
    if failures:
        yield Fault("threads: failed", "; ".join(failures))
    elif (far := max(apart(one, other) for one, other in zip(at_once, alone, strict=True))) > CLOSE:
        yield Fault("threads: other weights", f"{far:.1e}")

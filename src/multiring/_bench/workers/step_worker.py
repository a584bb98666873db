"""Time training steps of a rank: with multiring, with torch over one of its backends, or without communication.

It is run by its path, one process per rank, under any launcher that multiring supports: `PYTHON step_worker.py
CASE.json`. Before timing, it computes its own gradients without any library, and then with the library. Every
parameter's gradient has to be the mean of all ranks' own gradients, and after a step all ranks' parameters have to be
bit-identical.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt
from multiring._bench.workers.step_case import (
    ALONE,
    ANSWER,
    DDP,
    DDP_NCCL,
    DDP_OURS,
    DDP_OURS_HOOK,
    FSDP,
    FSDP_OURS,
    FSDP_OURS_ARENA,
    INDEPENDENT,
    OURS,
    FileRendezvous,
    StepCase,
    read_case,
)
from multiring._bench.workers.step_check import Sums, digest, mean_fault, signed_sums, tolerance_of
from multiring._bench.workers.step_emulated import EmulatedTask
from multiring._bench.workers.step_models import NETWORKS
from multiring._bench.workers.step_task import StepTask
from multiring._settings import Settings
from multiring._version import VERSION


@dataclass(frozen=True, slots=True)
class Training:
    """A model and its optimizer, prepared for a library.

    `is_shared`: the model is the same on all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    version: str
    settings: dict[str, str]
    is_shared: bool = True

    def step(self, task: StepTask) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        task.backward(self.model)
        self.optimizer.step()


# ---- the libraries ----


@contextlib.contextmanager
def with_multiring(task: StepTask, _rendezvous: FileRendezvous) -> Iterator[Training]:
    """Train with multiring's DistributedOptimizer, as at the start of its documentation."""
    mt.init()
    mt.broadcast_parameters(task.model.state_dict(), root_rank=0)
    compression = getattr(mt.Compression, task.case.wire or "none")
    optimizer = mt.DistributedOptimizer(task.optimizer(), task.model.named_parameters(), compression)
    settings = {"wire": task.case.wire} if task.case.wire else {}
    yield Training(task.model, optimizer, f"multiring {VERSION}, torch {torch.__version__}", settings)
    mt.shutdown()


@contextlib.contextmanager
def process_group(rendezvous: FileRendezvous, backend: str) -> Iterator[None]:
    """Create a process group of torch.distributed for the ranks, over one of its backends."""
    # Do not use init_method="file://...": torch does not decode %20 in the URL, so the ranks would never meet.
    store = dist.FileStore(str(rendezvous.folder / "store"), rendezvous.ranks)  # type: ignore[attr-defined] # torch does
    dist.init_process_group(backend, store=store, rank=rendezvous.rank, world_size=rendezvous.ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()


def ddp_training(task: StepTask, group: dist.ProcessGroup | None = None, *, hooked: bool = False) -> Training:
    """Return a DistributedDataParallel over `group` (None: all ranks).

    `hooked`: with multiring's communication hook.

    Settings: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    gradient_as_bucket_view saves a copy of every gradient. static_graph detects a full bucket without searching the
    graph. Buffers are not synchronised, because multiring does not do it either. Buckets have the default size, 25 MiB,
    as in multiring.
    """
    # torch 2.13 renamed this argument, and warns about the old name.
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    chosen = {"gradient_as_bucket_view": True, "static_graph": True}
    chosen["forward_sync_buffers" if is_new else "broadcast_buffers"] = False
    settings = {name: str(value) for name, value in chosen.items()}
    model = DistributedDataParallel(task.model, process_group=group, **chosen)  # type: ignore[arg-type] # all of these are booleans
    if hooked:
        model.register_comm_hook(mt.BucketSharing(process_group=group), mt.allreduce_hook)
        settings["hook"] = "allreduce_hook"
    return Training(model, task.optimizer(), f"torch {torch.__version__}", settings)


@contextlib.contextmanager
def with_ddp(
    task: StepTask, rendezvous: FileRendezvous, backend: str = "gloo", *, hooked: bool = False
) -> Iterator[Training]:
    """Train with DistributedDataParallel over a backend, see `ddp_training`."""
    with process_group(rendezvous, backend):
        training = ddp_training(task, hooked=hooked)
        yield replace(training, settings={"backend": backend, **training.settings})


@contextlib.contextmanager
def with_fsdp(
    task: StepTask, rendezvous: FileRendezvous, backend: str, *, in_arena: bool = False
) -> Iterator[Training]:
    """Train with fully_shard of the network's units and of the rest.

    Settings: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. If the backend's averages are
    wrong, as Gloo's were (https://github.com/pytorch/pytorch/issues/162338), gradients are summed and then divided.
    With `in_arena`, messages lie in the backend's memory.
    """
    # Imported only if needed: the import takes longer than most steps, and torch before 2.6 has it elsewhere.
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    settings = {"backend": backend}
    with process_group(rendezvous, backend):
        mesh = init_device_mesh("cpu", (rendezvous.ranks,))
        averages = _averages(rendezvous.ranks)
        for module in (*NETWORKS[task.case.network].units(task.model), task.model):
            unit = fully_shard(module, mesh=mesh)
            if not averages:
                unit.set_force_sum_reduction_for_comms(enable=True)
                settings["set_force_sum_reduction_for_comms"] = "True"
            if in_arena:
                unit.set_allocate_memory_from_process_group_for_comm(enable=True)
                settings["set_allocate_memory_from_process_group_for_comm"] = "True"
        yield Training(task.model, task.optimizer(), f"torch {torch.__version__}", settings)


def _averages(ranks: int) -> bool:
    """Return whether the backend's averages in a reduce_scatter are right."""
    # torch 2.13 renamed this function, and warns about the old name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mean = torch.zeros(1)
    scatter(mean, torch.full((ranks,), 1.0 + dist.get_rank()), op=dist.ReduceOp.AVG)
    return mean.item() == (1 + ranks) / 2


@contextlib.contextmanager
def with_nobody(task: StepTask, _rendezvous: FileRendezvous) -> Iterator[Training]:
    """Train each rank without communication."""
    yield Training(task.model, task.optimizer(), f"torch {torch.__version__}", {}, is_shared=False)


LIBRARIES: dict[str, Callable[[StepTask, FileRendezvous], contextlib.AbstractContextManager[Training]]] = {
    OURS: with_multiring,
    DDP: with_ddp,
    DDP_OURS: partial(with_ddp, backend="multiring"),
    DDP_OURS_HOOK: partial(with_ddp, backend="multiring", hooked=True),
    FSDP: partial(with_fsdp, backend="gloo"),
    FSDP_OURS: partial(with_fsdp, backend="multiring"),
    FSDP_OURS_ARENA: partial(with_fsdp, backend="multiring", in_arena=True),
    DDP_NCCL: partial(with_ddp, backend="nccl"),
    INDEPENDENT: with_nobody,
    ALONE: with_nobody,
}


def refusal(task: StepTask, rendezvous: FileRendezvous) -> str:
    """Return why the case's library cannot run here, or ""."""
    if task.case.library != DDP_NCCL:
        return ""
    if task.device.type != "cuda" or not dist.is_nccl_available():
        return f"{DDP_NCCL} needs GPUs, and a torch with NCCL"
    rendezvous.tell("device", str(torch.cuda.get_device_properties(task.device).uuid))
    gpus = len(set(rendezvous.hear("device")))
    if gpus == rendezvous.ranks:
        return ""
    return f"{rendezvous.ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}, and NCCL wants one each"


# ---- verification and timing ----


def fault(task: StepTask, training: Training, alone: Sums, rendezvous: FileRendezvous) -> str:
    """Take a step, and return a description of its error, or "".

    Args:
        task: the task whose gradients are compared.
        training: a training of that task.
        alone: this rank's gradients before any library changed the model.
        rendezvous: the rendezvous of the ranks.
    """
    rendezvous.tell("alone", alone)
    before = digest(task.model)
    # Take two steps: in the first step, DistributedDataParallel rebuilds its buckets and learns the graph.
    for _ in range(2):
        training.model.zero_grad()  # the optimizer's zero_grad raises for gradients that no step used
        task.reproducible_backward(training.model)
        all_alone = rendezvous.hear("alone") if training.is_shared else [alone]
        wrong = mean_fault(signed_sums(task.model), all_alone, tolerance_of(task.case.wire))
        if wrong:
            return wrong
    training.optimizer.step()
    if digest(task.model) == before:
        return "a step changed no parameter"
    return difference(task, training, rendezvous, "one step")


def difference(task: StepTask, training: Training, rendezvous: FileRendezvous, when: str) -> str:
    """Return "", or a sentence if the ranks' parameters differ after `when` although they should not."""
    rendezvous.tell(f"digest after {when}", digest(task.model))
    is_one = len(set(rendezvous.hear(f"digest after {when}"))) == 1
    return "" if is_one or not training.is_shared else f"after {when} the ranks' parameters differ"


def time_steps(case: StepCase, task: StepTask, training: Training, rendezvous: FileRendezvous) -> list[float]:
    """Return the seconds of each of `case.steps` steps, taken one straight after the other."""
    task.verified()
    for _ in range(case.warmup):
        training.step(task)
    task.synchronize()
    rendezvous.tell("warm", None)
    rendezvous.hear("warm")
    seconds = []
    for _ in range(case.steps):
        start = time.perf_counter()
        training.step(task)
        task.synchronize()
        seconds.append(time.perf_counter() - start)
    rendezvous.tell("timed", None)
    # Independent ranks do not end together. Ranks that end first continue, so that the last rank is timed under the
    # same load.
    while not training.is_shared and not rendezvous.is_told("timed"):
        training.step(task)
    return seconds


def main() -> None:
    """Time the case, and write the answer; exit with 1 if the library is wrong."""
    case = read_case()
    settings = Settings.from_environment()
    rendezvous = FileRendezvous(Path(case.out_dir), settings.rank or 0, settings.size or 1)
    torch.set_num_threads(case.threads)
    if case.device == "cuda" and not torch.cuda.device_count():
        raise SystemExit(f"torch {torch.__version__} sees no GPU: want a GPU and torch's CUDA build, or --device cpu")
    place = (rendezvous.rank, settings.local_rank or 0)
    task = EmulatedTask(case, rendezvous.rank) if case.pace else StepTask(case, *place)
    if reason := refusal(task, rendezvous):
        rendezvous.tell(ANSWER, {"wrong": "", "not_run": reason})
        return
    task.reproducible_backward(task.model)
    alone = signed_sums(task.model)
    task.model.zero_grad()
    with LIBRARIES[case.library](task, rendezvous) as training:
        answer: dict[str, Any] = {"wrong": fault(task, training, alone, rendezvous)}
        if not answer["wrong"]:
            answer["seconds"] = time_steps(case, task, training, rendezvous)
            answer["wrong"] = difference(task, training, rendezvous, "the timed steps")
        if answer["wrong"]:
            answer["wrong"] = f"{case.library} trains {case.network} wrongly, rank {rendezvous.rank}: {answer['wrong']}"
        answer |= {"version": training.version, "settings": training.settings}
        rendezvous.tell(ANSWER, answer)
        if answer["wrong"]:
            raise SystemExit(answer["wrong"])


if __name__ == "__main__":
    main()

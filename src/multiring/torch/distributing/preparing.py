"""distribute: prepare a model, an optimizer and a loader for any number of ranks."""

from collections.abc import Sized
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.lifecycle import init, rank, size
from multiring._frontend.process_sets import global_process_set, members_of
from multiring._gradients.options import GradientOptions
from multiring._runtime import is_initialized
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.compression import Compression, option_of
from multiring.torch.distributing.loader import DistributedLoader
from multiring.torch.distributing.rules import Rules
from multiring.torch.distributing.samples import require_same_samples, require_same_stored
from multiring.torch.distributing.weighing import Weighing
from multiring.torch.feeding import DataLoader as FedLoader
from multiring.torch.gradients.distributed import Distributed, setup_of
from multiring.torch.gradients.optimizer import DistributedOptimizer
from multiring.torch.gradients.parameters import broadcast_parameters
from multiring.torch.gradients.setup import placed, require_optimizer
from multiring.torch.gradients.state import broadcast_optimizer_state
from multiring.torch.interop import described
from multiring.torch.parallelizing.held import held_of

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Batch = TypeVar("Batch")

_WHAT = "distribute"
_IS_PARALLEL = (
    "model was already distributed by parallelize, whose step() reduces gradients; remove the call of distribute, and "
    "pass each batch of the loader to the parallel model's share()"
)


@overload
def distribute(
    model: Model,
    optimizer: Optimizer,
    loader: DataLoader[Batch],
    *,
    batch: str = ...,
    learning_rate: str | None = ...,
    reduction: str = ...,
    sharded: bool = ...,
    check: bool = ...,
    compression: Any = ...,
    shares: str = ...,
) -> tuple[Model, Optimizer, DistributedLoader[Batch]]: ...


@overload
def distribute(
    model: Model,
    optimizer: Optimizer,
    loader: FedLoader,
    *,
    batch: str = ...,
    learning_rate: str | None = ...,
    reduction: str = ...,
    sharded: bool = ...,
    check: bool = ...,
    compression: Any = ...,
    shares: str = ...,
) -> tuple[Model, Optimizer, FedLoader]: ...


def distribute(  # noqa: PLR0913 -- the options that a script for one process does not need
    model: Model,
    optimizer: Optimizer,
    loader: Any,
    *,
    batch: str = "global",
    learning_rate: str | None = None,
    reduction: str = "mean",
    sharded: bool = False,
    check: bool = True,
    compression: Any = Compression.none,
    shares: str = "equal",
) -> tuple[Model, Optimizer, Any]:
    """Prepare a model, its optimizer and its loader for training on all ranks.

    A script for one process then runs on any number of ranks. Every rank calls this function with the objects that it
    would use alone. The call joins the job if `init` has not been called. The model and the optimizer stay the same
    objects and get rank 0's parameters and state. Gradients become those of the global batch, even if ranks have parts
    of different sizes. The returned loader is a new object with the settings of the given loader.

    Args:
        model: the model, with its tensors in host memory or on CUDA devices.
        optimizer: an optimizer of the model's parameters. It may already be a DistributedOptimizer with its own
            options.
        loader: a DataLoader that makes batches. For a map-style data set, rank 0's sampler or batch sampler draws the
            samples of all ranks. An iterable data set is read as a whole by every rank, and has to give the same
            samples to all of them. A `multiring.torch.DataLoader` works too, because all ranks know its order: it is
            returned itself, set up for this rank.
        batch: "global": each batch of the loader is divided among the ranks, and the losses are those of one process,
            up to rounding. "per_rank": each rank gets a whole batch of the loader, so the global batch has as many
            batches as there are ranks.
        learning_rate: required with batch="per_rank". "linear" multiplies it by the number of ranks, "sqrt" by the
            square root of that number, and "keep" leaves it unchanged.
        reduction: "mean" or "sum": how the program's loss combines the losses of its samples.
        sharded: whether each rank's loader already gives this rank's own samples. They are then used unchanged. A rank
            whose samples are exhausted takes part until all ranks have none left.
        check: whether to check that ranks read the right samples. The call compares a few samples of the ranks' data
            sets, also of a `multiring.torch.DataLoader`, with what its transform makes of them. Each pass checks that
            the ranks' first batches differ. For an iterable data set that every rank reads as a whole, each step checks
            that the ranks read the same batch.
        compression: the type in which float32 gradients travel between hosts, as in DistributedOptimizer: a member of
            `Compression`, or its name.
        shares: "equal": each batch is divided equally among the ranks. "speed": each rank's part is in proportion to
            its measured speed, for machines of different speeds. The parts change before every 32nd batch that is
            drawn, if a step becomes more than 3 % shorter; the losses stay those of equal parts, up to rounding. The
            parameters have to be in host memory, and the data set map-style.

    Returns:
        The model, the optimizer and the loader to train with.

    Raises:
        ArgumentError: the options, or the options and the loader, contradict each other. During an iteration: two ranks
            have the same batch, or a rank has no samples.
        MismatchError: the ranks passed different arguments or have different data sets. During an iteration: they read
            different samples. Every rank raises it.
        StateError: a scheduler has already recorded the learning rate that has to be scaled.
        UnsupportedError: the loader's batches cannot be divided.

    Source of the rules: Goyal et al., "Accurate, large minibatch SGD", arXiv 1706.02677 (linear, with a warm-up);
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997 (sqrt).
    """
    if not is_initialized():
        init()
    group = members_of(global_process_set).group
    with reporting_errors(group, _WHAT):
        rules = Rules(
            batch=batch, learning_rate=learning_rate, reduction=reduction, sharded=sharded, check=check, shares=shares
        )
        _require_model(model)
        _require_optimizer(optimizer, rules)
        described_compression = _require_compression(optimizer, rules, compression)
        is_fed = isinstance(loader, FedLoader)
        if is_fed:
            _require_global(rules)
        else:
            _require_loader(loader)
            _require_whole_or_sharded(loader, rules)
        _require_of_model(optimizer, model)
        if rules.shares == "speed":
            _require_measurable(model, loader)
    lines = _signature_of_fed(loader) if is_fed else _signature_of(loader, rules)
    require_alike(group, _WHAT, [str(rules), f"compression={described_compression}", *lines])
    if size() > 1 and rules.check and not rules.sharded:
        if is_fed:
            require_same_stored(loader.samples)
        else:
            require_same_samples(loader)
    if size() > 1:
        broadcast_parameters(model, root_rank=0)
        broadcast_optimizer_state(optimizer, root_rank=0)
    rules.scale(optimizer, size())
    if setup_of(optimizer) is None:
        DistributedOptimizer(optimizer, model.named_parameters(), op=rules.op, compression=compression)
    weighing = Weighing(model, optimizer, rules.reduction, loader if is_fed else loader.dataset)
    if is_fed:
        loader.attend(rules, weighing, cast("Distributed", optimizer))
        return model, optimizer, loader
    return model, optimizer, DistributedLoader(loader, rules, weighing, cast("Distributed", optimizer))


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        if "multiring.torch.parallelizing" in type(model).__module__:
            raise ArgumentError(_IS_PARALLEL)
        raise ArgumentError(f"model is a {type(model).__name__}; want a torch.nn.Module")
    held = held_of(model.parameters())
    if held is not None:
        raise ArgumentError(_IS_PARALLEL)
    if isinstance(model, DistributedDataParallel):
        raise ArgumentError("model is a DistributedDataParallel, which reduces gradients itself; want its `module`")


def _require_of_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    # An optimizer that is already distributed may have parameters of other models as well.
    for place, parameter in placed(optimizer) if setup_of(optimizer) is None else ():
        if id(parameter) not in own:
            raise ArgumentError(
                f"the optimizer's {place}, {described(parameter)}, is not a parameter of the model: make the "
                "optimizer of model.parameters(), after the last change to the model"
            )


def _require_measurable(model: nn.Module, loader: Any) -> None:
    """Raise UnsupportedError if shares by speed cannot be measured, or not be given."""
    devices = {str(each.device) for each in model.parameters() if each.device.type != "cpu"}
    if devices:
        raise UnsupportedError(
            f"shares='speed' with parameters on {', '.join(sorted(devices))}: this process does not see how long a "
            "device computes, and how long it waits; want shares='equal', or multiring.torch.elastic.SpeedShares"
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"shares='speed' with an iterable data set, {type(loader.dataset).__name__}, whose batches workers divide "
            "ahead of time: want a map-style data set or a multiring.torch.DataLoader, or shares='equal'"
        )


def _require_optimizer(optimizer: Any, rules: Rules) -> None:
    require_optimizer(optimizer)
    rules.require_no_scheduler(optimizer)
    setup = setup_of(optimizer)
    if setup is None:
        return
    if setup.options.op != rules.op:
        raise ArgumentError(
            f"the optimizer is a DistributedOptimizer with op={setup.options.op!r}; reduction={rules.reduction!r} "
            f"wants op={rules.op!r}"
        )
    if setup.process_set is not global_process_set:
        raise ArgumentError(f"the optimizer is a DistributedOptimizer of {setup.process_set}; want one of all ranks")


def _require_compression(optimizer: Any, rules: Rules, compression: Any) -> str:
    """Return the name of `compression`; raise ArgumentError if it is invalid, or comes too late."""
    chosen = GradientOptions(op=rules.op, compression=option_of(compression)).compression
    if chosen is not None and setup_of(optimizer) is not None:
        raise ArgumentError(
            f"compression={compression!r} for an optimizer that is already a DistributedOptimizer: give compression to "
            "the DistributedOptimizer"
        )
    return str(getattr(chosen, "wire", type(chosen).__name__))


def _require_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ArgumentError(f"loader is a {type(loader).__name__}; want a torch.utils.data.DataLoader")
    if isinstance(loader, DistributedLoader):
        raise ArgumentError(
            "loader is a DistributedLoader, which `distribute` has returned already; pass the DataLoader that it was "
            "made from, or remove the second call"
        )
    for name in ("__iter__", "__len__"):
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            raise UnsupportedError(
                f"loader is a {type(loader).__name__}, with an {name} of its own, which a DistributedLoader "
                "would not use; want a torch.utils.data.DataLoader"
            )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise UnsupportedError(
            f"the loader's data set is a data pipe, {type(loader.dataset).__name__}, which divides its samples among "
            "ranks by torch.distributed; want a Dataset or an IterableDataset"
        )
    if loader.batch_sampler is None:
        raise UnsupportedError(
            "the loader has batch_size=None: batches that the data set makes cannot be divided or counted; want a data "
            "set that gives samples, and a batch_size"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise UnsupportedError("the loader has in_order=False: ranks would get different batches; want in_order=True")


def _require_global(rules: Rules) -> None:
    if rules.batch != "global" or rules.sharded:
        raise ArgumentError(
            f"batch={rules.batch!r}, sharded={rules.sharded} with a multiring.torch.DataLoader: this loader's batch is "
            "the global batch of all ranks; want batch='global' and sharded=False"
        )


def _signature_of_fed(loader: FedLoader) -> list[str]:
    state = loader.state_dict()
    return [f"data set {state['dataset']}, seed {state['seed']}, {loader.batching}", f"done: {state}"]


def _require_whole_or_sharded(loader: DataLoader[Any], rules: Rules) -> None:
    """Raise ArgumentError if a sampler deals to several ranks without `sharded`, or to the wrong rank."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        dealt = getattr(sampler, "num_replicas", 1)
        if dealt == 1 and not rules.sharded:
            continue
        name = type(sampler).__name__
        if not rules.sharded:
            raise ArgumentError(
                f"the loader's sampler, {name}, already divides the samples among {dealt} ranks; use the sampler of "
                "one process, or pass sharded=True to use each rank's samples unchanged"
            )
        own = getattr(sampler, "rank", None) if hasattr(sampler, "num_replicas") else None
        if own is not None and (own, dealt) != (rank(), size()):
            raise ArgumentError(
                f"the loader's sampler, {name}, selects samples for rank {own} of {dealt}; want rank {rank()} of "
                f"{size()}"
            )


def _signature_of(loader: DataLoader[Any], rules: Rules) -> list[str]:
    """Return the loader properties that must be equal, so that all ranks take equally many batches."""
    dataset: Any = loader.dataset
    lines = [
        f"the loader that it passed has num_workers={loader.num_workers}, prefetch_factor={loader.prefetch_factor}"
    ]
    if rules.sharded:
        return lines
    drops = getattr(loader.batch_sampler, "drop_last", False)
    lines.append(f"the loader that it passed has batch_size={loader.batch_size}, drop_last={drops}")
    is_counted = isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset)
    lines.append(f"the data set is a {type(dataset).__name__}" + (f" of {len(dataset)} samples" if is_counted else ""))
    return [*lines, f"batches are made by {type(loader.batch_sampler).__name__}"]

"""Compare each public helper of multiring.torch under each mesh with one process.

main.py runs this table. Each row is a helper. A cell is a row under a mesh, in a kind of loop: plain,
accumulating, with a last batch that the ranks cannot divide, or with two optimizers. The result of a cell is SAME,
REFUSED or a fault. `expected` defines the right result; docs/loop.md documents it for users.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from benchmarks.evidence.support.former import Cosine, either
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.parallelizing.deciding import Prospect, build, look

LOSS = nn.functional.mse_loss
_schedule = either("multiring.torch:schedule_learning_rate", "multiring.torch:schedule")
SAME, REFUSED = "same", "refused"
LOOPS = ("plain", "accumulation", "uneven", "two optimizers")
AXES = ("data", "shard", "tensor", "pipeline")
Mesh = dict[str, int]


def meshes(ranks: int) -> list[Mesh]:
    """Return every possible mesh of one or two axes for a number of ranks."""
    found = [{axis: ranks} for axis in AXES]
    if ranks == 4:
        found += [{"data": 2, axis: 2} for axis in AXES[1:]]
    return found


def meshes_without() -> list[Mesh]:
    """Return meshes that do not exist; `parallelize` refuses them by name."""
    pairs = [("shard", "tensor"), ("shard", "pipeline"), ("tensor", "pipeline")]
    return [*({first: 2, second: 2} for first, second in pairs), {"data": 2, "tensor": 2, "pipeline": 2}]


# ---- one training, on one process or on many ranks ----


def network() -> nn.Sequential:
    """Return the same network at each call.

    The network is wide enough for a tensor axis and has enough layers for four stages.
    """
    torch.manual_seed(0)
    made = nn.Sequential(
        *(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 32), nn.Tanh()),
        *(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)),
    )
    return made.double()


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return the same batches of 16 samples at each call."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator).double(), torch.randn(16, 4, generator=generator).double())
        for _ in range(count)
    ]


@cache
def prospect() -> Prospect:
    """Return the measurements of the network, which all meshes share."""
    return look(network(), (batches()[0][0],), None, 1, None)


Attach = Callable[["Training", torch.optim.Optimizer], Any]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer for rows that do not test an optimizer."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


class Training:
    """The training of a model on one process or on many ranks."""

    def __init__(self, mesh: Mesh | None, kind: str, folder: Path) -> None:
        self.mesh, self.kind, self.folder = mesh, kind, folder
        self.parallel = None if mesh is None else build(network(), prospect().taken(mesh), prospect())
        self.module: nn.Module = network() if self.parallel is None else self.parallel.module
        self.samples = [15 if kind == "uneven" and number == 3 else 16 for number in range(4)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank holds."""
        return list(self.module.parameters())

    def backward(self, inputs: Tensor, targets: Tensor, loss: Any = LOSS) -> Tensor:
        """Run forward and backward on a batch of all ranks; return its loss."""
        if self.parallel is not None:
            own, labels = self.parallel.share(inputs, targets)
            found: Tensor = self.parallel.step(own, labels, loss)
            return found
        made: Tensor = loss(self.module(inputs), targets)
        torch.autograd.backward([made])
        return made.detach()

    def optimizers(self, make: Make) -> list[torch.optim.Optimizer]:
        """Return one optimizer, or two optimizers that share the parameters between them."""
        if self.kind != "two optimizers":
            return [make(self.parameters)]
        return [
            make([each for each in self.parameters if each.dim() > 1]),
            make([each for each in self.parameters if each.dim() <= 1]),
        ]

    def train(self, optimizers: Sequence[torch.optim.Optimizer], **options: Any) -> None:
        """Run the training loop of this training's kind.

        Args:
            optimizers: The optimizers, which step together.
            options: `loss` replaces the loss, `after` is called after each backward, and `stepping` replaces the
                optimizer steps.
        """
        loss, after, stepping = (options.get(name) for name in ("loss", "after", "stepping"))
        passes = 2 if self.kind == "accumulation" else 1
        groups = [mt.accumulate(each, passes) for each in optimizers] if passes > 1 else []
        for number, (inputs, targets) in enumerate(batches()):
            count = self.samples[number]
            with _all(groups) as completes:
                self.backward(
                    inputs[:count],
                    targets[:count],
                    lambda made, labels, n=number: (loss(made, labels, n) if loss else LOSS(made, labels)) / passes,
                )
                if after is not None:
                    after(count)
                if stepping is not None:
                    if completes:
                        stepping()
                    continue
                for each in optimizers:
                    each.step()
                    each.zero_grad()


class _all:  # noqa: N801 -- a context
    """A context manager that enters several accumulations together."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def __enter__(self) -> bool:
        completes = [each.__enter__() for each in self._groups]
        return all(completes)

    def __exit__(self, *what: object) -> None:
        for each in self._groups:
            each.__exit__(*what)


# ---- rows ----


def _optimizer(make: Make) -> Callable[[Training], None]:
    return lambda here: here.train(here.optimizers(make))


def _attached(attach: Attach, make: Make = sgd) -> Callable[[Training], None]:
    def loop(here: Training) -> None:
        optimizers = here.optimizers(make)
        attached = [attach(here, each) for each in optimizers]
        here.train(optimizers)
        for each in attached:
            if hasattr(each, "flush"):
                each.flush()
        for each in attached[:1]:
            if hasattr(each, "applied"):
                each.applied().__enter__()

    return loop


def _clipped(here: Training) -> None:
    optimizers = here.optimizers(sgd)

    def stepping() -> None:
        nn.utils.clip_grad_norm_(here.parameters, 0.05)
        for each in optimizers:
            each.step()
            each.zero_grad()

    if here.kind == "accumulation":  # the form of loop that docs/loop.md shows
        group = mt.accumulate(optimizers[0], 2)
        for inputs, targets in batches():
            with group as completes:
                here.backward(inputs, targets, lambda made, labels: LOSS(made, labels) / 2)
                if completes:
                    nn.utils.clip_grad_norm_(here.parameters, 0.05)
                optimizers[0].step()
                optimizers[0].zero_grad()
        return
    here.train(optimizers, stepping=stepping)


def _scaled(here: Training) -> None:
    optimizers, scaler = here.optimizers(sgd), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # a stage that does not compute the loss needs an initialized scaler

    def loss(made: Tensor, labels: Tensor, number: int) -> Tensor:
        found: Tensor = scaler.scale(LOSS(made, labels) * (float("inf") if number == 1 else 1.0))
        return found

    def stepping() -> None:
        for each in optimizers:
            scaler.unscale_(each)
        nn.utils.clip_grad_norm_(here.parameters, 0.05)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        for each in optimizers:
            each.zero_grad()

    here.train(optimizers, loss=loss, stepping=stepping)


def _in_parts(here: Training, optimizers: Sequence[torch.optim.Optimizer], watches: Sequence[Any]) -> None:
    """Train in steps of two micro-batches each, for every kind of loop."""
    for number, (inputs, targets) in enumerate(batches()):
        count = here.samples[number]
        here.backward(inputs[:count], targets[:count], lambda made, labels: LOSS(made, labels) / 2)
        for watch in watches:
            watch.part(count)
        if number % 2:
            for each in optimizers:
                each.step()
                each.zero_grad()


def _noise(here: Training) -> None:
    optimizers = here.optimizers(sgd)
    watches = [mt.noise_scale(each, every=1, warns=False) for each in optimizers]
    _in_parts(here, optimizers, watches)
    told = [value for each in watches for value in (each.value, each.batch)]
    here.module.register_buffer("noise", torch.tensor(told, dtype=torch.float64))


def _adascale(here: Training) -> None:
    optimizers = here.optimizers(sgd)
    watches = [mt.noise_scale(each, every=1, warns=False) for each in optimizers]
    for each, watch in zip(optimizers, watches, strict=True):
        mt.adascale(each, Cosine(10), watch, scale=2.0, batch=8)
    _in_parts(here, optimizers, watches)


def _groups(here: Training) -> None:
    if here.kind == "two optimizers":
        decayed, plain = mt.parameter_groups(here.module, weight_decay=0.1, trust_ratio=False)
        here.train([torch.optim.AdamW([decayed], lr=0.01), torch.optim.AdamW([plain], lr=0.02)])
        return
    here.train([mt.LARS(mt.parameter_groups(here.module, weight_decay=0.1), lr=1.0)])


def _by_name(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    return {f"optimizer_{number}": each for number, each in enumerate(optimizers)}


def _saved(here: Training) -> None:
    """Save half-way, load into another model of the same mesh, and continue there."""
    make: Make = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731 -- as rows have it
    optimizers = here.optimizers(make)
    here.train(optimizers)
    if here.parallel is None:
        here.train(optimizers)
        return
    path = here.folder / re.sub(r"\W+", "-", f"{here.mesh} {here.kind}")
    mt.save(path, model=here.module, **_by_name(optimizers))
    again = Training(here.mesh, here.kind, here.folder)
    with torch.no_grad():
        for each in again.parameters:
            each.zero_()
    new = again.optimizers(make)
    mt.load(path, model=again.module, **_by_name(new))
    here.parallel, here.module = again.parallel, again.module
    again.train(new)


def _refuses(call: Callable[[Training, torch.optim.Optimizer], Any]) -> Callable[[Training], None]:
    """Return a loop that also makes a `call` which a parallel model must refuse."""

    def loop(here: Training) -> None:
        optimizers = here.optimizers(sgd)
        if here.parallel is not None:
            call(here, optimizers[0])
        here.train(optimizers)

    return loop


def _distribute(here: Training, optimizer: torch.optim.Optimizer) -> None:
    mt.distribute(here.module, optimizer, DataLoader(TensorDataset(*batches()[0]), batch_size=8))


def _elastic(here: Training, optimizer: torch.optim.Optimizer) -> None:
    mt.elastic.TorchState(model=here.module, optimizer=optimizer).sync()


def _counted(here: Training) -> None:
    """Call `training_report` with a function of the plain model."""
    if here.parallel is not None:
        mt.training_report(
            here.module, lambda plain: plain(batches()[0][0]).sum(), samples=8, measure=lambda: {"m": 1e9}
        )
    here.train(here.optimizers(sgd))


def _metrics(here: Training) -> None:
    """Compute the mean loss of the last batch from the ranks' own samples."""
    optimizers = here.optimizers(sgd)
    here.train(optimizers)
    losses = []
    for inputs, targets in batches():
        losses.append(float(here.backward(inputs, targets)))
    found = mt.mean({"loss": losses[-1]}, weight=16)["loss"] if here.parallel is not None else losses[-1]
    told: list[float] = []
    log = mt.metrics_hook(lambda: lambda metrics, _step: told.append(metrics["loss"]), every=2)
    for step, each in enumerate(losses):
        log(step, {"loss": each}, weight=16)
    log.flush(len(losses))
    here.module.register_buffer("mean", torch.tensor([found], dtype=torch.float64))
    if told:
        here.module.register_buffer("told", torch.tensor(told, dtype=torch.float64))


def _gathered(here: Training) -> None:
    """Gather rows from all ranks; keep them once for each data rank."""
    here.train(here.optimizers(sgd))
    inputs, _ = batches()[0]
    if here.parallel is None:
        here.module.register_buffer("rows", inputs)
        return
    own = here.parallel.share(inputs)[0]
    told = mt.gather({"row": own, "part": torch.full((len(own),), here.parallel.data_rank)})
    places = [int(torch.nonzero(told["part"] == part)[0]) for part in range(here.parallel.data_ranks)]
    rows = [told["row"][place : place + len(own)] for place in places]
    here.module.register_buffer("rows", torch.cat(rows))


@dataclass(frozen=True, slots=True)
class Row:
    """A helper of the table, or the torch function that a program uses instead.

    Attributes:
        names: The names in `multiring.torch` that the row covers.
        loop: Trains with the helper.
        refused: The meshes or kinds of loops that this helper refuses, in addition to those that all rows refuse.
    """

    names: tuple[str, ...]
    loop: Callable[[Training], None]
    refused: tuple[str, ...] = ()


PARTS = ("shard", "tensor", "pipeline")
EVERY = ("data", *PARTS)
ROWS: dict[str, Row] = {
    "`accumulate`, with `clip_grad_norm_`": Row(("accumulate",), _clipped),
    "`torch.amp.GradScaler`, with an overflow": Row((), _scaled),
    "`torch.optim` alone": Row(
        ("seed_everything", "init", "rank", "size"), _optimizer(lambda each: torch.optim.AdamW(each, lr=0.01))
    ),
    "`clip_gradients`": Row(("clip_gradients",), _attached(lambda _here, each: mt.clip_gradients(each, 0.05))),
    "`gradient_lag`": Row(("gradient_lag",), _attached(lambda _here, each: mt.gradient_lag(each))),
    "`moving_average`": Row(
        ("moving_average",), _attached(lambda here, each: mt.moving_average(each, here.module, 0.5))
    ),
    "`schedule_learning_rate`": Row(
        ("schedule_learning_rate",),
        _attached(lambda _here, each: _schedule(each, Cosine(10))),
    ),
    "`adascale`, with `part`": Row(("adascale",), _adascale),
    '`mixed_precision("bf16")`': Row(
        ("mixed_precision",), _attached(lambda _here, each: mt.mixed_precision(each, "bf16"))
    ),
    '`mixed_precision("fp16")`': Row((), _refuses(lambda _here, each: mt.mixed_precision(each, "fp16")), EVERY),
    "`noise_scale`, with `part`": Row(("noise_scale",), _noise),
    "`parameter_groups`": Row(("parameter_groups",), _groups),
    "`LARS`": Row(("LARS",), _optimizer(lambda each: mt.LARS(each, lr=1.0, weight_decay=0.01))),
    "`LAMB`": Row(("LAMB",), _optimizer(lambda each: mt.LAMB(each, lr=0.01))),
    "`LARC`": Row(("LARC",), _optimizer(lambda each: mt.LARC(sgd(each)))),
    "`LARC` around Adam": Row((), _optimizer(lambda each: mt.LARC(torch.optim.Adam(each, lr=0.01)))),
    "`Muon`, with AdamW": Row(
        ("Muon", "NewtonSchulz"),
        lambda here: here.train(
            [
                mt.Muon([each for each in here.parameters if each.dim() > 1], lr=0.01),
                torch.optim.AdamW([each for each in here.parameters if each.dim() == 1], lr=0.01),
            ]
        ),
        ("shard", "tensor"),
    ),
    "`Shampoo`": Row(
        ("Shampoo", "Eigendecomposition"),
        _optimizer(
            lambda each: mt.Shampoo(each, lr=0.01, eigendecomposition=mt.Eigendecomposition(frequency=2, block=8))
        ),
        ("shard", "tensor"),
    ),
    "`save` and `load`": Row(("save", "load", "is_saved"), _saved),
    "`mean`, `metrics_hook`": Row(("mean", "metrics_hook", "MetricsHook"), _metrics),
    "`gather`": Row(("gather",), _gathered),
    "`distribute`, `DistributedOptimizer`": Row(("distribute", "DistributedLoader"), _refuses(_distribute), EVERY),
    "`DistributedOptimizer`, and what it compresses": Row(
        ("DistributedOptimizer", "Compression", "PowerSGD", "Adasum"),
        _refuses(lambda here, each: mt.DistributedOptimizer(each, here.module.named_parameters(), op=mt.Adasum)),
        EVERY,
    ),
    "`gradient_bytes`": Row(("gradient_bytes",), _refuses(lambda _here, each: mt.gradient_bytes(each)), EVERY),
    "`broadcast_parameters`": Row(
        ("broadcast_parameters",), _refuses(lambda here, _each: mt.broadcast_parameters(here.module, 0)), PARTS
    ),
    "`broadcast_parameters` of a state_dict": Row(
        (), _refuses(lambda here, _each: mt.broadcast_parameters(here.module.state_dict(), 0)), PARTS
    ),
    "`broadcast_optimizer_state`": Row(
        ("broadcast_optimizer_state",),
        _refuses(lambda _here, each: mt.broadcast_optimizer_state(each, 0)),
        PARTS,
    ),
    "`convert_sync_batchnorm`": Row(
        ("convert_sync_batchnorm", "SyncBatchNorm"),
        _refuses(lambda here, _each: mt.convert_sync_batchnorm(here.module)),
        EVERY,
    ),
    "`elastic.TorchState`": Row(("elastic",), _refuses(_elastic), PARTS),
    "`training_report`": Row(("training_report",), _counted, PARTS),
}

_OF_TENSORS = "a collective of tensors that the program hands over: it knows of no model"
_OF_THE_JOB = "of the job and its ranks"
_OF_DATA = "of the samples, which docs/parallelize.md says how to divide; the first batch is compared"
# The names without a row, and the reasons. A test fails for a name that has neither a row nor an entry here.
WITHOUT_ROW: dict[str, str] = {
    **dict.fromkeys(
        [
            *("allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
            *("alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
            *("grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_"),
            *("grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter"),
            *("grouped_reducescatter_async", "reducescatter", "reducescatter_async", "sparse_allreduce_async"),
            *("allgather_object", "broadcast_object", "poll", "synchronize", "Average", "Max", "Min", "Product", "Sum"),
        ],
        _OF_TENSORS,
    ),
    **dict.fromkeys(
        [
            *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"),
            *("is_homogeneous", "is_initialized", "local_rank", "local_size", "log_by_rank", "on_first_rank"),
            *("print_once", "progress", "barrier", "monitored_barrier", "join", "shutdown", "ProcessSet"),
            *("add_process_set", "remove_process_set", "global_process_set", "HorovodInternalError"),
            *("CollectiveError", "error_of", "local_device", "device_path"),
            *("start_timeline", "stop_timeline", "cross_rank", "cross_size", "gloo_enabled", "mpi_enabled"),
            "mpi_threads_supported",
        ],
        _OF_THE_JOB,
    ),
    **dict.fromkeys(["DataLoader", "IterableDataset", "measure_bottleneck"], _OF_DATA),
    "measured_peak": "of the machine",
    "parallelize": "what makes the meshes",
    "carry_to_width": "it comes before the mesh, and refuses DTensors",
    "BucketSharing": "a hook of DistributedDataParallel, which a program gives its own",
    "allreduce_hook": "a hook of DistributedDataParallel, which a program gives its own",
    "shared_zeros_like": "memory of tensors",
}


def expected(row: Row, mesh: Mesh, kind: str) -> str:
    """Return the right result of a cell."""
    axes = set(mesh)
    if row.refused and axes & set(row.refused):
        return REFUSED
    if kind == "uneven" and axes & {"data", "shard", "pipeline"}:
        return REFUSED
    return SAME


def cell(row: Row, mesh: Mesh, kind: str, folder: Path) -> str:
    """Return the result of a helper under a mesh, in a kind of loop.

    All ranks must call this function.
    """
    parallel = Training(mesh, kind, folder)
    failure: Exception | None = None
    try:
        row.loop(parallel)
    except (ArgumentError, UnsupportedError) as error:
        return REFUSED if len(str(error)) > 30 else f"WRONG: refused without a word: {error}"
    except Exception as error:  # noqa: BLE001 -- returned as the cell's fault
        failure = error
    if failure is not None:
        return f"WRONG: {type(failure).__name__}: {failure}"
    truth = truth_of(row, kind)
    for name, tensor in _tensors(parallel.module):
        found, want = tensor, truth[name]
        if not torch.allclose(found, want, rtol=1e-6, atol=1e-9, equal_nan=True):
            return f"WRONG: {name} is off by {float((found - want).abs().max()):.1e}"
    return SAME


@cache
def truth_of(row: Row, kind: str) -> dict[str, Tensor]:
    """Return the tensors of one process after the loop.

    All meshes share this result.
    """
    one = Training(None, kind, Path())
    row.loop(one)
    return dict(_tensors(one.module))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        whole: Tensor = getattr(each, "full_tensor", lambda each=each: each)()
        yield name.removeprefix("module."), whole.detach()


Cell = tuple[str, Mesh, str]


def cells(ranks: int, *, is_thinned: bool = False) -> Iterator[Cell]:
    """Yield each helper under each mesh of a number of ranks, in each kind of loop.

    With `is_thinned`, each helper and mesh gets only one kind of loop, in rotation.
    """
    for number, name in enumerate(ROWS):
        for turn, mesh in enumerate(meshes(ranks)):
            for kind in [LOOPS[(number + turn) % len(LOOPS)]] if is_thinned else LOOPS:
                yield name, mesh, kind


def fault_of(name: str, mesh: Mesh, kind: str, folder: Path) -> str:
    """Return the fault of a cell, or "" if its result is right."""
    found, want = cell(ROWS[name], mesh, kind, folder), expected(ROWS[name], mesh, kind)
    return "" if found == want else f"{name}, {mesh}, {kind}: {found}; want {want}"

"""Choose a parallelism for a model and a batch, and build the model on its mesh."""

import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from multiring._topology import Topology
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.planner.parallelism import (
    Axis,
    Forecast,
    Parallelism,
    chosen,
    forecast,
    forecasts,
    parallelism_of,
    table,
)
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm
from multiring.torch.parallelizing.anatomy import anatomy_of
from multiring.torch.parallelizing.batch_norm import restore_batch_norms, synchronise_batch_norms
from multiring.torch.parallelizing.building import divided, equalise, replicated, sharded
from multiring.torch.parallelizing.held import held_of
from multiring.torch.parallelizing.measuring import batch_of
from multiring.torch.parallelizing.model import ParallelModel
from multiring.torch.parallelizing.placing import mesh_of, topology_now
from multiring.torch.parallelizing.profiling import MeasuredProfile, measure
from multiring.torch.parallelizing.staging import Cut, ModelStage
from multiring.torch.parallelizing.trying import TrialOutcome, tried

Mesh = str | Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """A model's measurements for a batch, and a forecast per parallelism, best first."""

    inputs: tuple[Tensor, ...]
    measured: MeasuredProfile
    topology: Topology
    memory_bytes: float | None
    forecasts: list[Forecast]

    def taken(self, mesh: Mesh, without: Collection[Parallelism] = ()) -> Parallelism:
        """Return the parallelism for `mesh`, with the best placement of its axes.

        Args:
            mesh: "auto", or axes and their sizes.
            without: parallelisms that "auto" must not choose.

        Raises:
            ArgumentError: the axes are impossible for this model, or no parallelism fits into memory.
        """
        if not isinstance(mesh, Mapping):
            left = [each for each in self.forecasts if each.parallelism not in without]
            return chosen(left, self.memory_bytes).parallelism
        return forecast(parallelism_of(mesh), self.measured.profile, self.topology, self.memory_bytes).parallelism


def decide(model: nn.Module, mesh: Mesh, prospect: Prospect) -> ParallelModel:
    """Choose a parallelism, print it on rank 0, and build the model.

    Raises:
        ArgumentError: no parallelism fits into memory, the model runs under none, or it does not run under the
            requested one.
    """
    parallelism, outcomes = settled(model, mesh, prospect)
    difference = outcomes[parallelism].difference
    if dist.get_rank() == 0:
        told = table(prospect.forecasts, parallelism, prospect.measured.profile, prospect.topology)
        failed = [f"  not {mix}: {found.failure}\n" for mix, found in outcomes.items() if found.failure]
        apart = [
            f"  {mix} trains another function: {each.difference}\n" for mix, each in outcomes.items() if each.difference
        ]
        sys.stdout.write("".join((told, *failed, *apart)))
        sys.stdout.flush()
        if difference:
            warnings.warn(
                f"parallelize: under {parallelism}, {difference}: the model does not treat each sample by itself, and "
                "each rank computes with its own part of the batch. Training will differ from that of one process",
                stacklevel=3,
            )
    return build(model, parallelism, prospect)


def settled(model: nn.Module, mesh: Mesh, prospect: Prospect) -> tuple[Parallelism, dict[Parallelism, TrialOutcome]]:
    """Return the chosen parallelism, and the outcome of each trial.

    Every rank calls it. "auto" chooses the best parallelism that runs and has the gradients of one process. If no
    parallelism has these gradients, it chooses the best parallelism that runs.

    Raises:
        ArgumentError: no parallelism fits into memory, the model runs under none, or it does not run under the
            requested one.
    """
    outcomes: dict[Parallelism, TrialOutcome] = {}
    fitting = [each.parallelism for each in prospect.forecasts if each.fits]
    while isinstance(mesh, Mapping) or not outcomes or len(outcomes) < len(fitting):
        parallelism = prospect.taken(mesh, outcomes)
        found = tried(model, prospect.inputs, parallelism, prospect.measured, lambda m, p: build(m, p, prospect))
        outcomes[parallelism] = found
        if isinstance(mesh, Mapping) and found.failure:
            raise ArgumentError(f"mesh={dict(mesh)}: the model does not run under {parallelism}: {found.failure}")
        if isinstance(mesh, Mapping) or not (found.failure or found.difference):
            return parallelism, outcomes
    running = [mix for mix, found in outcomes.items() if not found.failure]
    if not running:
        reasons = "; ".join(f"{mix}: {found.failure}" for mix, found in outcomes.items())
        raise ArgumentError(f"the model cannot run under any mix of {dist.get_world_size()} ranks: {reasons}")
    return running[0], outcomes


def look(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    memory_bytes: float | None,
    optimizer_states: int,
    topology: Topology | None,
) -> Prospect:
    """Measure `model` and forecast each parallelism.

    Afterwards all ranks have rank 0's parameters. Every rank calls it.

    Raises:
        ArgumentError: `inputs` are no batch, `topology` has another number of ranks, or the model has a SyncBatchNorm.
        UnsupportedError: the model is not in host memory.
    """
    batch_of(inputs)
    elsewhere = [name for name, each in model.named_parameters() if each.device.type != "cpu"]
    if elsewhere:
        raise UnsupportedError(
            f"parameter {elsewhere[0]} is on {model.get_parameter(elsewhere[0]).device}: want all of them in host"
            " memory"
        )
    _refuse_synchronised(model)
    placed = topology_now() if topology is None else topology
    if placed.ranks != dist.get_world_size():
        raise ArgumentError(f"topology of {placed.ranks} ranks: want a topology of all {dist.get_world_size()} ranks")
    held = held_of(model.parameters())
    if held is not None and not held.is_whole:
        raise ArgumentError(
            f"parallelize was already called for this model ({held.parallelism}), so each rank has a part: make "
            "the model again"
        )
    restore_batch_norms(model)
    equalise(model)
    measured = measure(model, inputs, anatomy_of(model, placed.ranks), optimizer_states, placed)
    return Prospect(
        inputs=inputs,
        measured=measured,
        topology=placed,
        memory_bytes=memory_bytes,
        forecasts=forecasts(measured.profile, placed, memory_bytes),
    )


def _refuse_synchronised(model: nn.Module) -> None:
    """Raise ArgumentError if a layer communicates by itself.

    Such a layer would wait for the other ranks while one rank is measured.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm | SyncBatchNorm):
            raise ArgumentError(
                f"{name or 'the model'} is a SyncBatchNorm, which communicates with all ranks by itself: want a plain "
                "BatchNorm, which parallelize synchronises over the ranks that have samples of their own"
            )


def refuse_what_cannot_be(mesh: Mesh) -> None:
    """Check the process group and `mesh` before anything is measured.

    Raises:
        StateError: torch.distributed has no process group.
        ArgumentError: `mesh` is neither "auto" nor a valid set of axes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("torch.distributed is not initialised; call torch.distributed.init_process_group() first")
    if isinstance(mesh, Mapping):
        parallelism_of(mesh)
    elif mesh != "auto":
        raise ArgumentError(f'mesh={mesh!r}: want "auto", or axes and their sizes, like {{"data": 2, "tensor": 2}}')


def build(model: nn.Module, parallelism: Parallelism, prospect: Prospect) -> ParallelModel:
    """Build `model` under `parallelism`.

    Every rank calls it, with the same parameters.
    """
    profile = prospect.measured.profile
    anatomy = anatomy_of(model, parallelism.ranks)
    mesh = mesh_of(parallelism, prospect.topology)
    stage = None
    parts = [axis for axis in (Axis.DATA, Axis.SHARD) if parallelism.size(axis) > 1]
    synchronise_batch_norms(model, [mesh.get_group(axis.value) for axis in parts])
    if parallelism.size(Axis.SHARD) > 1:
        model = sharded(model, anatomy.parts, profile.units, mesh)
    elif parallelism.size(Axis.TENSOR) > 1:
        model = divided(model, anatomy.splits, mesh[Axis.TENSOR.value])
    elif parallelism.size(Axis.PIPELINE) > 1:
        cut = Cut(
            parts=anatomy.parts,
            units=profile.units,
            made=prospect.measured.made,
            group=mesh.get_group(Axis.PIPELINE.value),
            samples=profile.batch // parallelism.data_ranks,
            microbatches=parallelism.microbatches,
        )
        stage = ModelStage(model, prospect.inputs, cut)
    else:
        model = replicated(model, mesh.get_group(Axis.DATA.value))
    return ParallelModel(model, mesh, prospect.forecasts, parallelism, profile.batch, stage)

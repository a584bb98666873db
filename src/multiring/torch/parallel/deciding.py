"""The whole way: from a model and a batch to the model on its mesh."""

import sys
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from multiring.errors import ArgumentError, StateError
from multiring.planner.mixes import Axis, Forecast, Mix, Profile, chosen, forecast, forecasts, mix_of, table
from multiring.topology import Topology
from multiring.torch.parallel.anatomy import Anatomy, anatomy_of
from multiring.torch.parallel.building import divided, equalise, replicated, sharded
from multiring.torch.parallel.measuring import batch_of
from multiring.torch.parallel.model import ParallelModel
from multiring.torch.parallel.placing import mesh_of, topology_now
from multiring.torch.parallel.profiling import Measured, measure
from multiring.torch.parallel.staging import Cut, Stage

Mesh = str | Mapping[str, int]


def decide(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    mesh: Mesh,
    memory_bytes: float | None,
    optimizer_states: int,
    topology: Topology | None,
) -> ParallelModel:
    """Do what `parallelize` says."""
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("torch.distributed is not initialised; call torch.distributed.init_process_group() first")
    wanted = _wanted(mesh)
    batch_of(inputs)
    placed = topology_now() if topology is None else topology
    if placed.ranks != dist.get_world_size():
        raise ArgumentError(f"topology of {placed.ranks} ranks: want one of all {dist.get_world_size()}")
    equalise(model)
    anatomy = anatomy_of(model, dist.get_world_size())
    measured = measure(model, inputs, anatomy, optimizer_states)
    profile = measured.profile
    found = forecasts(profile, placed, memory_bytes)
    taken = chosen(found, memory_bytes) if wanted is None else forecast(wanted, profile, placed, memory_bytes)
    if dist.get_rank() == 0:
        sys.stdout.write(table(found, taken.mix, profile, placed))
        sys.stdout.flush()
    return _built(model, inputs, (anatomy, measured), (taken.mix, placed), found)


def _wanted(mesh: Mesh) -> Mix | None:
    if isinstance(mesh, Mapping):
        return mix_of(mesh)
    if mesh != "auto":
        raise ArgumentError(f'mesh={mesh!r}: want "auto", or axes and their sizes, like {{"data": 2, "tensor": 2}}')
    return None


def _built(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    known: tuple[Anatomy, Measured],
    laid: tuple[Mix, Topology],
    found: list[Forecast],
) -> ParallelModel:
    anatomy, measured = known
    profile: Profile = measured.profile
    mix = laid[0]
    mesh = mesh_of(*laid)
    stage = None
    if mix.size(Axis.SHARD) > 1:
        model = sharded(model, anatomy.parts, profile.units, mesh)
    elif mix.size(Axis.TENSOR) > 1:
        model = divided(model, anatomy.splits, mesh[Axis.TENSOR.value])
    elif mix.size(Axis.PIPELINE) > 1:
        cut = Cut(
            parts=anatomy.parts,
            units=profile.units,
            made=measured.made,
            group=mesh.get_group(Axis.PIPELINE.value),
            samples=profile.batch // mix.data_ranks,
            microbatches=mix.microbatches,
        )
        stage = Stage(model, inputs, cut)
    else:
        model = replicated(model, mesh.get_group(Axis.DATA.value))
    return ParallelModel(model, mesh, found, mix, profile.batch, stage)

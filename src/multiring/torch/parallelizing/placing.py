"""The placement of mesh axes on ranks: the last axis lies on neighbouring ranks."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from multiring import _runtime as runtime
from multiring._runtime.bootstrap.addresses import host_id
from multiring._runtime.job.joining import hosts_of
from multiring._runtime.rails.topology_file import read_topology
from multiring._settings import Settings
from multiring._topology import Topology, grid_of
from multiring.planner.parallelism import Axis, Parallelism


def topology_now() -> Topology:
    """Return the topology of torch's ranks. Every rank calls it.

    If multiring has joined a job of as many ranks, its topology is returned. Otherwise ranks are grouped by host, and a
    topology file (MULTIRING_TOPOLOGY) gives the costs of links.

    Raises:
        ArgumentError: the file cannot be read, or does not contain a host.
    """
    if runtime.is_initialized() and runtime.size() == dist.get_world_size():
        return runtime.world().topology
    settings = Settings.from_environment()
    peer_infos: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(peer_infos, (host_id(), os.uname().nodename))
    hosts = hosts_of([host for host, _ in peer_infos])
    names = tuple(peer_infos[ranks[0]][1] for ranks in hosts)
    if settings.topology is None:
        return Topology(hosts, names=names)
    return read_topology(settings.topology).placed(hosts, names)


def mesh_of(parallelism: Parallelism, topology: Topology) -> DeviceMesh:
    """Return the DeviceMesh of `parallelism`, with its axes placed on the ranks.

    The mesh lists its axes in the order data, shard, tensor, pipeline.
    """
    _, order = grid_of(topology)
    laid = torch.tensor(order).reshape([size for _, size in parallelism.axes])
    names = [axis for axis, _ in parallelism.axes]
    wanted = [axis for axis in Axis if axis in names]
    turned = laid.permute([names.index(axis) for axis in wanted])
    return DeviceMesh("cpu", turned, mesh_dim_names=tuple(axis.value for axis in wanted))

"""Read the variables in which torchrun takes its options: PET_NNODES and others.

Kubeflow Trainer sets them in each pod of a TrainJob. Source: torch/distributed/argparse_util.py (`env`), and
pkg/runtime/framework/plugins/torch/torch.go of github.com/kubeflow/trainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from multiring.errors import ArgumentError

_NODES, _NODE_RANK, _RANKS = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
_ADDRESS, _PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
TORCHRUN_OPTIONS = (_NODES, _NODE_RANK, _RANKS, _ADDRESS, _PORT)
_COUNTED_BY_TORCHRUN = ("auto", "gpu", "cpu", "xpu")
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class TorchrunNodes:
    """The place of this node in a job, as torchrun's variables give it.

    - ranks: the number of ranks on each node, or None if it is to be the number of devices.
    - meet: the address of node 0, HOST:PORT. It is empty if the job has one node.
    """

    nodes: int
    node_rank: int
    ranks: int | None
    meet: str


def torchrun_nodes(environment: Mapping[str, str]) -> TorchrunNodes | None:
    """Return the place of this node, or None if PET_NNODES is not set.

    Raises:
        ArgumentError: a variable is missing or has an invalid value.
    """
    if not environment.get(_NODES):
        return None
    nodes = _number(environment, _NODES, 1)
    text = environment.get(_RANKS, "auto")
    ranks = None if text in _COUNTED_BY_TORCHRUN else _number(environment, _RANKS, 1)
    if nodes == 1:
        return TorchrunNodes(1, 0, ranks, "")
    rank = _number(environment, _NODE_RANK, 0, nodes - 1)
    if not environment.get(_ADDRESS):
        raise ArgumentError(_not_set(_ADDRESS, "the host name of node 0"))
    port = _number(environment, _PORT, 1, _MOST_PORT)
    host = environment[_ADDRESS]
    return TorchrunNodes(nodes, rank, ranks, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def without_torchrun_nodes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without these variables.

    A launcher that a rank starts makes a job of its own.
    """
    return {name: text for name, text in environment.items() if name not in TORCHRUN_OPTIONS}


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    wanted = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    text = environment.get(name)
    if not text:
        raise ArgumentError(_not_set(name, wanted))
    if not (text.isascii() and text.isdigit()) or int(text) < least or (most is not None and int(text) > most):
        raise ArgumentError(f"{name}={text!r}: want {wanted}")
    return int(text)


def _not_set(name: str, wanted: str) -> str:
    return f"{_NODES} is set and {name} is not: want {wanted}, or give --nodes, --node-rank and --meet"

"""The place of a node in torchrun's variables PET_*."""

import pytest

from multiring._launch.torchrun_variables import TorchrunNodes, torchrun_nodes, without_torchrun_nodes
from multiring.errors import ArgumentError

WHOLE = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


def test_the_place_is_read() -> None:
    assert torchrun_nodes(WHOLE) == TorchrunNodes(3, 1, 2, "job-node-0-0.job:29500")
    assert torchrun_nodes(WHOLE | {"PET_MASTER_ADDR": "fd00::1"}) == TorchrunNodes(3, 1, 2, "[fd00::1]:29500")


def test_without_a_number_of_nodes_there_is_no_place() -> None:
    assert torchrun_nodes({}) is None
    assert torchrun_nodes({"PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": ""}) is None


def test_one_node_needs_no_address() -> None:
    assert torchrun_nodes({"PET_NNODES": "1"}) == TorchrunNodes(1, 0, None, "")
    assert torchrun_nodes({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}) == TorchrunNodes(1, 0, 4, "")


@pytest.mark.parametrize("text", ["auto", "gpu", "cpu", "xpu"])
def test_torchruns_words_leave_the_number_of_ranks_open(text: str) -> None:
    place = torchrun_nodes(WHOLE | {"PET_NPROC_PER_NODE": text})
    assert place is not None
    assert place.ranks is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES='1:4': want an integer >= 1"),
        ({"PET_NNODES": "0"}, "PET_NNODES='0': want an integer >= 1"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK='3': want an integer from 0 to 2"),
        ({"PET_NODE_RANK": "-1"}, "PET_NODE_RANK='-1': want"),
        ({"PET_NODE_RANK": ""}, "PET_NNODES is set and PET_NODE_RANK is not: want an integer from 0 to 2"),
        ({"PET_NPROC_PER_NODE": "two"}, "PET_NPROC_PER_NODE='two': want an integer >= 1"),
        ({"PET_MASTER_ADDR": ""}, "PET_NNODES is set and PET_MASTER_ADDR is not: want the host name of node 0"),
        ({"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT='99999': want an integer from 1 to 65535"),
        ({"PET_MASTER_PORT": ""}, "PET_MASTER_PORT is not: want an integer from 1 to 65535, or give --nodes"),
    ],
)
def test_invalid_places_are_named(change: dict[str, str], error: str) -> None:
    with pytest.raises(ArgumentError, match="PET_") as found:
        torchrun_nodes(WHOLE | change)
    assert error in str(found.value)


def test_ranks_do_not_inherit_the_place() -> None:
    assert without_torchrun_nodes(WHOLE | {"PATH": "/bin"}) == {"PATH": "/bin"}

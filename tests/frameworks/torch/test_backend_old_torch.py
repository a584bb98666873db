"""Torch before 2.7 is rejected with an error that names its version.

These versions may free an operation of a Python backend while DDP waits for it.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.grouped_ranks import enter
from tests.support.ranks import Here, run_ranks

from multiring.torch.c10d.creating import require_torch
from multiring.torch.c10d.errors import RefusedError


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0+cu121", "2.6.0"])
def test_older_ones_are_refused(version: str) -> None:
    with pytest.raises(RefusedError, match=rf"this is torch {version.replace('+', '.')}.*want torch 2\.7 or newer"):
        require_torch(version)


@pytest.mark.parametrize("version", ["2.7.0", "2.7.1+cpu", "2.13.0", "3.0.0a0+git1234"])
def test_newer_ones_are_taken(version: str) -> None:
    require_torch(version)


def test_what_this_torch_gets(tmp_path: Path) -> None:
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
    assert run_ranks(meet, 2, str(tmp_path / "store")) == [is_old, is_old]


def meet(here: Here, place: str) -> bool:
    """Return whether multiring refused to make a process group."""
    try:
        enter(here, place)
    except RefusedError as error:
        assert "DistributedOptimizer" in str(error)  # noqa: PT017 -- either outcome is valid
        return True
    dist.destroy_process_group()
    return False

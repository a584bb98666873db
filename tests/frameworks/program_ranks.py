"""Runs programs for torch.distributed as scripts, in ranks that have torchrun's environment and nothing else.

Forked ranks cost milliseconds where torchrun's would each import torch and its libraries for seconds.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import socket
import sys
from pathlib import Path

import torch
from tests.wire.nursery import Here
from tests.wire.ranks import run_ranks

PROGRAMS = Path(__file__).parents[2] / "examples" / "distributed"
NURSERY = "programs"  # of its own: other tests' ranks are not to be forked with all these libraries
_LIBRARIES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.parallel",
    "accelerate",
    "pytorch_lightning",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
)


def losses_of(program: str, ranks: int, *arguments: str, backend: str, deadline_s: float = 100.0) -> list[float]:
    """Return the losses that `program` prints on rank 0.

    Args:
        program: a file's name in examples/distributed.
        ranks: how many.
        arguments: of its command line, besides the backend's name.
        backend: torch's name of it.
        deadline_s: a rank that has not ended by then is killed.

    Raises:
        RanksFailed: a rank raised, or did not end.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--backend", backend, *arguments]
    printed: str = run_ranks(_run, ranks, program, port, words, deadline_s=deadline_s)[0]
    losses: list[float] = json.loads(printed.splitlines()[-1])
    return losses


def _run(here: Here, program: str, port: int, words: list[str]) -> str:
    """Run the program, and return what it prints."""
    for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
        del os.environ[name]  # the rig's, which torchrun does not have
    os.environ |= {
        "RANK": str(here.rank),
        "LOCAL_RANK": str(here.rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(here.size),
        "LOCAL_WORLD_SIZE": str(here.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "programs",
        "HF_HUB_OFFLINE": "1",
    }
    torch.set_num_threads(1)
    path = PROGRAMS / program
    sys.argv = [str(path), *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


# Only where ranks are forked from: the test's own process has no use for them.
_main = getattr(sys.modules["__main__"], "__spec__", None)
if _main is not None and _main.name == "tests.wire.nursery":
    for library in _LIBRARIES:
        importlib.import_module(library)

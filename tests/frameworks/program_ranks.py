"""Runs programs for torch.distributed as people do: each rank is a process with the environment that torchrun sets.

What else torchrun does, a store where the ranks meet, is done here: torchrun itself would import torch once more.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does

PROGRAMS = Path(__file__).parents[2] / "examples" / "distributed"
GRACE_S = 60.0  # for the others, once a rank has ended
LAST_WORDS = 4000  # characters of a rank's output that an error quotes


class ProgramError(AssertionError):
    """A rank ended with an error, or did not end: says which, and what it wrote last."""


def losses_of(program: str, ranks: int, *arguments: str, backend: str, deadline_s: float = 300.0) -> list[float]:
    """Return the losses that `program` prints on rank 0.

    Args:
        program: a file's name in examples/distributed.
        ranks: how many.
        arguments: of its command line, besides the backend's name.
        backend: torch's name of it.
        deadline_s: a rank that has not ended by then is stopped, and says where it was.

    Raises:
        ProgramError: a rank ended with an error, or did not end.
    """
    command = [sys.executable, str(PROGRAMS / program), "--backend", backend, *arguments]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as opened:
        outputs = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        said = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            opened.enter_context(_ending(command, environment_of(rank, ranks, store.port), outputs[rank], said[rank]))
            for rank in range(ranks)
        ]
        late = _wait(processes, deadline_s)
        codes = [process.poll() for process in processes]
        outputs[0].seek(0)
        printed = outputs[0].read()
        if any(codes) and not (backend == "gloo" and printed and _are_lost_at_exit(said)):
            raise ProgramError("\n".join([" ".join(command), *map(_told, range(ranks), codes, late, said)]))
        losses: list[float] = json.loads(printed.splitlines()[-1])
        return losses


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives a rank of one host, whose store is at `port`."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    return inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "programs",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that is aborted says where it was
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def _ending(
    command: list[str], environment: dict[str, str], output: IO[str], said: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and leave none behind."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> list[bool]:
    """Wait until all have ended, abort those that have not in time, and return which these were."""
    end = time.monotonic() + deadline_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode is not None for process in processes):
            end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    late = [process.poll() is None for process in processes]
    for process, is_late in zip(processes, late, strict=True):
        if is_late:
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()
    return late


def _are_lost_at_exit(said: Sequence[IO[str]]) -> bool:
    """Return whether ranks did all they had to, and died or hung as the interpreter was already gone.

    That happens on Gloo now and then, whatever other backends are installed: its threads let go of tensors that Python
    knows when Python has ended. See https://github.com/pytorch/pytorch/pull/179291; to go when torch has an answer.
    """
    for file in said:
        file.seek(0)
    texts = [file.read() for file in said]
    return not any("Traceback" in text or ", line " in text for text in texts)


def _told(rank: int, code: int | None, is_late: bool, said: IO[str]) -> str:  # noqa: FBT001 -- one of a row's columns
    """Return how a rank ended, and the last of what it wrote."""
    said.seek(0)
    how = "did not end" if is_late else f"ended with {code}"
    return f"rank {rank} {how}: {said.read()[-LAST_WORDS:]}"

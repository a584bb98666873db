"""Run torch.distributed programs on ranks with the environment that torchrun sets.

Each rank is a process. This module also provides the store where the ranks meet. torchrun itself would import torch
once more.
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

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch defines it

PROGRAMS = Path(__file__).parents[2] / "examples" / "distributed"
GRACE_S = 60.0  # for the other ranks, once a rank has ended
LAST_WORDS = 4000  # characters of a rank's output that an error quotes


class ProgramError(AssertionError):
    """A rank failed or did not end; the text names it and quotes its last output."""


def losses_of(program: str, ranks: int, *arguments: str, backend: str, deadline_s: float = 300.0) -> list[float]:
    """Return the losses that `program` prints on rank 0.

    Args:
        program: the name of a file in examples/distributed.
        ranks: the number of ranks.
        arguments: further command-line arguments of the program.
        backend: the backend's name in torch.
        deadline_s: the time after which a running rank is aborted; it then prints its stack.

    Raises:
        ProgramError: a rank failed or did not end.
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
    """Return the environment that torchrun gives a rank on one host.

    The ranks' store listens at `port`.
    """
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
        "PYTHONFAULTHANDLER": "1",  # an aborted rank prints its stack
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def _ending(
    command: list[str], environment: dict[str, str], output: IO[str], said: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it at the end of the context."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> list[bool]:
    """Wait for all processes, abort late ones, and return whether each was late."""
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
    """Return whether ranks failed only when the interpreter was already exiting.

    Gloo's threads sometimes release tensors after Python has ended, whatever other backends are installed. See
    https://github.com/pytorch/pytorch/pull/179291; remove this function once torch has fixed it.
    """
    for file in said:
        file.seek(0)
    texts = [file.read() for file in said]
    return not any("Traceback" in text or ", line " in text for text in texts)


def _told(rank: int, code: int | None, is_late: bool, said: IO[str]) -> str:  # noqa: FBT001 -- map passes it
    """Return how a rank ended, and the end of its output."""
    said.seek(0)
    how = "did not end" if is_late else f"ended with {code}"
    return f"rank {rank} {how}: {said.read()[-LAST_WORDS:]}"

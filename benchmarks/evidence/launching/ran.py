"""Run commands for the launching evidence, with their output and exit codes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring._settings import inherited_environment

PYTHON = sys.executable
MULTIRING = (sys.executable, "-m", "multiring")
OURS = (
    "MULTIRING_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a command.

    Attributes:
        code: The return code as in subprocess, or None if the command was killed at its deadline.
    """

    code: int | None
    out: bytes
    err: bytes

    @property
    def words(self) -> str:
        """The whole output as text."""
        return (self.out + self.err).decode(errors="replace")


def plain_environment() -> dict[str, str]:
    """Return this process's environment without the variables that launchers set."""
    return {name: text for name, text in inherited_environment().items() if not name.startswith(OURS)}


def ran(
    words: Sequence[str | Path],
    folder: Path,
    *,
    variables: Mapping[str, str] | None = None,
    deadline_s: float = 40.0,
    one_file: bool = False,
) -> Ran:
    """Run a command in `folder` until it ends or its deadline passes.

    With `one_file`, standard error goes to the same file as standard output.
    """
    out, err = folder / "evidence.out", folder / "evidence.err"
    with out.open("w+b") as out_file, err.open("w+b") as err_file:
        process = subprocess.Popen(  # noqa: S603 -- our own
            [os.fspath(word) for word in words],
            cwd=folder,
            env={**plain_environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=subprocess.STDOUT if one_file else err_file,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # the launcher shuts its ranks down
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return Ran(code, out.read_bytes(), err.read_bytes())


def shell(text: str) -> list[str]:
    """Return a command that runs a line of shell script."""
    return ["bash", "-c", text]


def shown(done: Ran) -> str:
    """Return the result of a command as a text for a fault."""
    return f"code {done.code}; it wrote: {done.words[-400:]}"


def lines_by_rank(data: bytes, ranks: int) -> dict[int, list[bytes]]:
    """Return each rank's lines without their tags, and lines without a tag under -1."""
    found: dict[int, list[bytes]] = {rank: [] for rank in range(-1, ranks)}
    for line in data.split(b"\n")[:-1]:
        for rank in range(ranks):
            tag = b"[%d] " % rank
            if line.startswith(tag):
                found[rank].append(line.removeprefix(tag))
                break
        else:
            if not line.startswith(b"multiring: "):
                found[-1].append(line)
    return found

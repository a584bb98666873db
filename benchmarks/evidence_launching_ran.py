"""Running commands for the evidence of launching: what they wrote, byte for byte, and how they ended."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.settings import inherited_environment

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
    """How a command ended. `code` is as subprocess has it; None where it did not end in time and was killed."""

    code: int | None
    out: bytes
    err: bytes

    @property
    def words(self) -> str:
        """All that it wrote, as text."""
        return (self.out + self.err).decode(errors="replace")


def plain_environment() -> dict[str, str]:
    """Return this process's environment without what a launcher may have set."""
    return {name: text for name, text in inherited_environment().items() if not name.startswith(OURS)}


def ran(
    words: Sequence[str | Path],
    folder: Path,
    *,
    variables: Mapping[str, str] | None = None,
    deadline_s: float = 40.0,
    one_file: bool = False,
) -> Ran:
    """Run a command in `folder` to its end; with `one_file` its standard error goes where its standard output goes."""
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
            process.terminate()  # a launcher ends its ranks
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return Ran(code, out.read_bytes(), err.read_bytes())


def shell(text: str) -> list[str]:
    """Return the command that runs a line of shell."""
    return ["bash", "-c", text]


def shown(done: Ran) -> str:
    """Return how a command ended, for a fault's text."""
    return f"code {done.code}; it wrote: {done.words[-400:]}"


def lines_by_rank(data: bytes, ranks: int) -> dict[int, list[bytes]]:
    """Return each rank's lines without their tags; what has none is under -1."""
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

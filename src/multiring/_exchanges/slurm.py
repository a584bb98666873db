"""A job step of Slurm, and the ways by which its ranks tell each other where to meet."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multiring._exchanges.contract import PlaceExchange
from multiring._exchanges.munge import MungeExchange
from multiring._exchanges.pmi2 import Pmi2Exchange
from multiring._exchanges.pmix import PmixExchange
from multiring._exchanges.shared_file import SharedFileExchange
from multiring.errors import ArgumentError

_PART = re.compile(r"(?P<text>[^\[\],]*)(?:\[(?P<numbers>[^\]]*)\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """A step that srun has started.

    Args:
        name: a text that no other step has. It contains the number of restarts of a requeued job, so a run never takes
            what a former run has left behind.
        hosts: the names of the step's hosts. Rank 0 usually is on the first.
        folders: folders that all hosts may see.
        ports: the ports on which rank 0 may listen, both ends included; None allows any.
    """

    name: str
    hosts: tuple[str, ...]
    folders: tuple[Path, ...]
    ports: tuple[int, int] | None = None

    @classmethod
    def of(cls, foreign: Mapping[str, str], ports: tuple[int, int] | None) -> "SlurmStep":
        """Return the step of srun's variables.

        Raises:
            ArgumentError: SLURM_STEP_NODELIST is not a list of hosts.
        """
        listed = foreign.get("SLURM_STEP_NODELIST", "")
        parts = (foreign.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
        # Two steps of a heterogeneous job can have the same numbers; their hosts differ.
        digest = hashlib.sha256(listed.encode()).hexdigest()[:8]
        folders = [Path(foreign["SLURM_SUBMIT_DIR"])] if "SLURM_SUBMIT_DIR" in foreign else []
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 -- Path.home raises where there is none
        folders += [home] if home.is_absolute() and home not in folders else []
        return cls(
            name=f"{'.'.join(parts)}-{digest}",
            hosts=hosts_of(listed),
            folders=tuple(folders),
            ports=ports,
        )


def ways_of_step(step: SlurmStep, foreign: Mapping[str, str]) -> list[PlaceExchange]:
    """Return the ways for the ranks of `step`, the best one first.

    Slurm's own PMI needs no port and no file. munge needs a port, and a file also a folder that all hosts share.
    """
    return [
        Pmi2Exchange(foreign.get("PMI_FD"), foreign.get("PMI_JOBID", ""), foreign.get("PMI_RANK", "")),
        PmixExchange(foreign.get("PMIX_NAMESPACE")),
        MungeExchange(step.name, step.hosts, step.ports),
        SharedFileExchange(step.name, step.folders),
    ]


def hosts_of(listed: str) -> tuple[str, ...]:
    """Return the hosts of a list in Slurm's short form, like `gpu[01-03,7],login`.

    Raises:
        ArgumentError: `listed` does not have this form.
    """
    hosts: list[str] = []
    for entry in _entries(listed):
        names = [""]
        for part in _PART.finditer(entry):
            numbers = [""] if part["numbers"] is None else _numbers(listed, part["numbers"])
            names = [f"{name}{part['text']}{number}" for name in names for number in numbers]
        hosts += names
    return tuple(hosts)


def _entries(listed: str) -> list[str]:
    """Split at the commas outside brackets."""
    if re.sub(r"\[[^\[\]]*\]", "", listed).count("[") + re.sub(r"\[[^\[\]]*\]", "", listed).count("]"):
        raise ArgumentError(f"SLURM_STEP_NODELIST={listed!r}: want a list of hosts like gpu[01-03,7],login")
    return [entry for entry in re.split(r",(?![^\[]*\])", listed) if entry]


def _numbers(listed: str, text: str) -> list[str]:
    numbers: list[str] = []
    for each in text.split(","):
        if re.fullmatch(r"[0-9]+(-[0-9]+)?", each) is None:
            raise ArgumentError(f"SLURM_STEP_NODELIST={listed!r}: {each!r} is not a number or a range like 01-03")
        first, _, last = each.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers

"""Mutants of programs on devices: each leaves out an ordering, and its program must then be wrong on some rank.

A test file has a table MUTANTS, from names to pairs: a program, and the function that leaves the ordering out.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import pytest
import torch
from tests.standin.torch_devices import CYCLES_PER_US
from tests.support.lateness import drawn, tries

import multiring.torch as mt

SEEDS = range(5 if "MULTIRING_TEST_ALL_SEEDS" in os.environ else 1)
LATE = {"delay_us": 1000}  # of the stand-ins
LATE_US = 12_000  # how long `busy` occupies a stream in the first tries

Patch = pytest.MonkeyPatch
Program = TypeVar("Program", bound=Hashable)


def busy() -> None:
    """Occupy the current stream."""
    torch.cuda._sleep(int(drawn(LATE_US)) * CYCLES_PER_US)


def side_stream() -> Any:
    """Return a new stream of the current device."""
    stream_of: Any = torch.cuda.Stream
    return stream_of()


def nothing(*_arguments: Any, **_options: Any) -> None:
    """Leave an ordering out."""


def late_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy on the current stream, much later."""
    busy()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def judged(
    mutants: Mapping[str, tuple[Program, Callable[[Patch], Any]]],
    is_right: Callable[[Program], bool],
    prepare: Callable[[Patch, Program], Any] = nothing,
) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether its program is right without it, and whether no run with it is wrong on any rank.

    Args:
        mutants: the programs and mutants, by name.
        is_right: runs a program, and returns whether its results are right on this rank.
        prepare: widens the moments that the orderings protect.
    """
    found, right = {}, {}
    for name, (program, mutate) in mutants.items():
        with Patch.context() as patch:
            prepare(patch, program)
            if program not in right:
                right[program] = is_right(program)
            mutate(patch)
            is_found = any(not all(mt.allgather_object(is_right(program))) for _ in tries())
            torch.cuda.synchronize()
        found[name] = right[program], not is_found
    return found


def require_needed(by_rank: list[dict[str, tuple[bool, bool]]]) -> None:
    """Assert by what `judged` returned on each rank that each program is right, and that each mutant is found."""
    names = list(by_rank[0])
    wrong = [name for name in names if not all(each[name][0] for each in by_rank)]
    assert wrong == [], f"wrong without a mutant: {wrong}"
    missed = [name for name in names if all(each[name][1] for each in by_rank)]
    assert missed == [], f"not found: {missed}"

"""Promises to users of torch, tested by public names only.

The tests therefore also run on older versions.
"""

import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.plain import join
from tests.support.processes import process_group
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt

HOSTILE = ["a", "b", "a.b", ".", "..", "", "a/b", "a.b.c", "1", 1, "0", 0, "['a']", "b.", ".b", "a\0b", "ü", "model"]


def hostile_tree(pick: random.Random, depth: int) -> Any:
    """Return nested dicts whose joined names collide; each leaf has another number."""
    if not depth or pick.random() < 0.3:
        return torch.tensor([pick.random(), float(depth)])
    return {name: hostile_tree(pick, depth - 1) for name in pick.sample(HOSTILE, 5)}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, wanted)
    names = [[(type(name), name) for name in each] for each in (found, wanted)]
    return names[0] == names[1] and all(same(found[name], each) for name, each in wanted.items())


def keep_what_is_under_each_name(_here: Here, folder: str) -> None:
    mt.init()
    a, b = torch.zeros(2), torch.ones(2)
    trees: list[Any] = [{"a": {"b": a}, "a.b": b}, {1: a, "1": b}, {"": {"a": a}, "a": b, ".a": a}]
    trees += [{"first": hostile_tree(random.Random(seed), 3)} for seed in range(12)]  # noqa: S311 -- draws names
    for tree in trees:
        mt.save(f"{folder}/c", tree=tree)
        assert same(mt.load(f"{folder}/c")["tree"], tree), tree


def test_names_that_meet_when_they_are_joined_are_two(tmp_path: Path) -> None:
    run_ranks(keep_what_is_under_each_name, 1, str(tmp_path))


KILLED_TWICE = """
import os, shutil, signal, sys
import torch
import multiring.torch as mt

CHANGES = {"os.rename", "os.link", "os.symlink"}
folder = sys.argv[1]


def child(act):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 9
    try:
        mt.init()
        code = act()
    finally:
        os._exit(code)


def saving(place, step, dies_at):
    # The exit code is 10 plus the number of renames and links. The process is killed before change number dies_at.
    def act():
        seen = 0

        def look(event, _):
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        mt.save(f"{place}/ck", step=step, w=torch.ones(3))
        return 10 + seen

    return child(act)


def load(place):
    def act():
        return mt.load(f"{place}/ck")["step"] if mt.is_saved(f"{place}/ck") else 7

    return os.waitstatus_to_exitcode(child(act))


def copied(place, name):
    return shutil.copytree(place, f"{folder}/{name}", symlinks=True)


begun = f"{folder}/begun"
os.mkdir(begun)
assert os.waitstatus_to_exitcode(saving(begun, 1, 0)) > 10
changes = os.waitstatus_to_exitcode(saving(copied(begun, "counted"), 2, 0)) - 10
assert 1 <= changes < 30, changes
lost = []
for first in range(1, changes + 1):
    once = copied(begun, f"once{first}")
    assert saving(once, 2, first) == signal.SIGKILL
    for second in range(1, changes + 1):
        twice = copied(once, "twice")
        ended = saving(twice, 3, second)
        found = load(twice)
        if found not in ((1, 2, 3) if ended == signal.SIGKILL else (3,)):
            lost.append((first, second, found))
        shutil.rmtree(twice)
print("lost after kills at", lost)
sys.exit(bool(lost))
"""


def test_two_kills_at_any_two_changes_of_names_leave_a_checkpoint(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED_TWICE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def allow_dynamos_warnings() -> None:
    """Ignore the compiler's warnings, because the test compares values only."""
    warnings.simplefilter("ignore")


def compile_ours(here: Here) -> None:
    join(here)
    allow_dynamos_warnings()
    x = torch.arange(3.0) + here.rank

    def step() -> Tensor:
        w = torch.ones(3, requires_grad=True)
        mt.allreduce(w * x, op=mt.Sum).square().sum().backward()  # type: ignore[no-untyped-call] # torch lacks a type
        assert w.grad is not None
        return mt.broadcast(mt.allgather(w.grad * 2) + x[0], 1)

    assert torch.equal(torch.compile(step, backend="eager")(), step())


def compile_torchs(here: Here, store: Path) -> None:
    with process_group(here, store):
        allow_dynamos_warnings()
        x = torch.arange(4.0) + here.rank
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        parallel = DistributedDataParallel(model)

        def step() -> Tensor:
            model.zero_grad()
            y = parallel(x)
            y.square().sum().backward()
            sums = y.detach() * 2
            dist.all_reduce(sums)
            work = dist.broadcast(sums, 1, async_op=True)
            assert work is not None
            work.wait()
            return torch.cat([sums, *(each.grad.flatten() for each in model.parameters() if each.grad is not None)])

        eager = step()
        assert eager.numel() == 25
        assert torch.allclose(torch.compile(step, backend="eager")(), eager)
        assert torch.allclose(torch.compile(parallel, backend="eager")(x), parallel(x))


def test_compiled_functions_compute_what_they_did(tmp_path: Path) -> None:
    run_ranks(compile_ours, 2, deadline_s=250.0)
    run_ranks(compile_torchs, 2, tmp_path / "store", deadline_s=250.0)

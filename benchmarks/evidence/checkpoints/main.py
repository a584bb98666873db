"""Compare checkpoints with the saved values under kills and concurrent access.

    python benchmarks/evidence/checkpoints/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--against CHECKOUT]

See benchmarks/evidence/support/cases.py for the options. The families in this module save random values, save into
folders with foreign files, and run writers and readers at the same time. They choose the moments of kills at random.

The families of crashes.py count instead. They try every crash point of a save, every pair of crash
points, a disk fault at each call and power cuts. They also stop a second writer and a reader at each call. The families
of states.py check colliding names, program states, trainings and several ranks.

After a kill, `load` must return the last completed save, or a later save that was killed.
"""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.checkpoints.crashes import FAMILIES as CRASHES
from benchmarks.evidence.checkpoints.states import FAMILIES as STATES
from benchmarks.evidence.data.faults import loaded
from benchmarks.evidence.support.cases import Family, Fault, Random, Topic, main

import multiring.torch as mt
from multiring.errors import ArgumentError

KEYS: list[Any] = [
    "a",
    "b",
    "a.b",
    "b.a",
    "a.b.a",
    ".",
    "",
    "/",
    "..",
    "\0",
    "1",
    "0",
    0,
    1,
    "None",
    None,
    "True",
    2.5,
    "2.5",
    (1, 2),
]
NUMPY_KINDS = ["?", "b", "H", "i", "q", "e", "f", "d", "F", "D", ">i2", ">u4", ">f4", ">f8", ">c8"]
TORCH_KINDS = ["bool", "uint8", "uint16", "int64", "float16", "bfloat16", "float32", "complex64", "complex128"]
TORCH_KINDS += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


# ---- values ----


def drawn(random: Random, depth: int, kinds: list[tuple[str, str]]) -> Any:
    """Return a random tree of arrays of these kinds, with keys that may collide."""
    if depth and random.random() < 0.6:
        picks = random.choice(len(KEYS), size=int(random.integers(1, 6)), replace=False)
        return {KEYS[each]: drawn(random, depth - 1, kinds) for each in picks}
    shape = tuple(random.integers(0, 4, int(random.integers(0, 3))))
    framework, name = kinds[int(random.integers(len(kinds)))]
    if framework == "numpy":
        array = random.integers(0, 100, shape).astype(name)
        return array.T if random.random() < 0.3 else array
    tensor = torch.from_numpy(np.asarray(random.integers(0, 100, shape), np.float32)).to(getattr(torch, name))
    return tensor.t() if tensor.ndim == 2 and random.random() < 0.3 else tensor


def bits(value: Any) -> tuple[Any, ...]:
    """Return the framework, type, shape and bytes of an array."""
    if isinstance(value, torch.Tensor):
        memory = value.contiguous().as_strided((value.numel(),), (1,))
        data = memory.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return "torch", str(value.dtype), tuple(value.shape), data
    array = np.asarray(value)
    return "numpy", array.dtype.str, array.shape, array.tobytes()


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each leaf of a tree with its path of keys; each key comes with its type."""
    if isinstance(tree, dict):
        for key, each in tree.items():
            yield from leaves(each, (*path, (type(key).__name__, key)))
    else:
        yield path, tree


def values(random: Random, folder: Path) -> Iterator[Fault]:
    """Save and load a random tree: it comes back unchanged, or `save` refuses it."""
    _begin()
    every = [*(("numpy", each) for each in NUMPY_KINDS), *(("torch", each) for each in TORCH_KINDS)]
    # A case uses only a few kinds, because one refused kind would hide the others.
    kinds = [every[each] for each in random.choice(len(every), size=int(random.integers(1, 4)), replace=False)]
    tree = {name: drawn(random, 3, kinds) for name in "uvwxyz"}
    wanted = {path: bits(each) for path, each in leaves(tree)}
    try:
        mt.save(folder / "c", tree=tree)
    except ArgumentError:
        return
    try:
        found = {path: bits(each) for path, each in leaves(mt.load(folder / "c")["tree"])}
    except Exception as error:  # noqa: BLE001 -- after any error, the saved data is lost
        is_float8 = any("float8" in each[1] for each in wanted.values())
        yield Fault(f"values: {'float8 saved, and not loaded' if is_float8 else 'saved, and not loaded'}", repr(error))
        return
    joined: dict[str, int] = {}
    for path in wanted:
        name = ".".join(str(key) for _, key in path)
        joined[name] = joined.get(name, 0) + 1
    for path, each in wanted.items():
        if found.get(path) == each:
            continue
        meets = joined[".".join(str(key) for _, key in path)] > 1
        kind = "names meet" if meets else "big-endian changed" if each[1].startswith(">") else "changed"
        yield Fault(f"values: {kind}", f"{path}: saved {each}, loaded {found.get(path)}")


# ---- folders with foreign files ----


def strangers(random: Random, folder: Path) -> Iterator[Fault]:
    """Save into a folder with foreign files: each file keeps its content."""
    _begin()
    target = folder / "run"
    names = [
        "notes.txt",
        "manifest.json",
        "shared.json",
        "a/b.csv",
        "epoch0/manifest.json",
        ".hidden",
        "rank-00000.json",
    ]
    texts = ["", "{}", "a week of it", '{"format": 7}', '{"manifest_version": 3}']
    files = {}
    for each in random.choice(len(names), size=int(random.integers(1, 5)), replace=False):
        file = target / names[each]
        file.parent.mkdir(parents=True, exist_ok=True)
        files[file] = texts[int(random.integers(len(texts)))]
        file.write_text(files[file])
    before = Path.cwd()
    path: str | Path = target
    if random.random() < 0.3:
        os.chdir(target)
        path = ["", ".", "./"][int(random.integers(3))]
    try:
        mt.save(path, value=1)
    except ArgumentError:
        pass
    finally:
        os.chdir(before)
    for file, text in files.items():
        if not file.exists() or file.read_text() != text:
            yield Fault(
                "strangers: a file of others is gone", f"{file.relative_to(folder)} of {sorted(map(str, files))}"
            )


# ---- kills, writers, readers: each save in its own process ----


def _begin() -> None:
    if not mt.is_initialized():
        mt.init()


def hook_calls(act: Callable[[str], None]) -> None:
    """Make every call that changes a file run `act` first, with the call's name."""

    def hooked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            act(name)
            return call(*arguments, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, hooked(name, getattr(os, name)))
    real = io.open

    def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wx+a"):
            act("open")
        return real(file, mode, *arguments, **options)

    io.open = opening


def in_child(act: Callable[[], str]) -> tuple[int, str]:
    """Run `act` in a child process; return the exit status and the text of the child."""
    hears, says = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(hears)
        try:
            text = act()
        except BaseException as error:  # noqa: BLE001 -- sent to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(says, text.encode()[:4000])
        os._exit(0)
    os.close(says)
    with os.fdopen(hears, "rb") as file:
        text = file.read().decode(errors="replace")
    return os.waitpid(pid, 0)[1], text


def saving(path: Path, step: int, size: int, act: Callable[[str], None] | None) -> str:
    """Save a step, with a tensor filled with the step's number."""
    mt.init()
    if act is not None:
        hook_calls(act)
    mt.save(path, step=step, value=torch.full((size,), float(step)))
    return "saved"


def looking(path: Path) -> str:
    """Return the step that `load` finds, "nothing", or "torn" for mixed steps."""
    mt.init()
    if not mt.is_saved(path):
        return "nothing"
    found = mt.load(path)
    if not bool((found["value"] == found["step"]).all()):
        return "torn"
    return str(found["step"])


def killer(at: int) -> Callable[[str], None]:
    """Return a hook that kills its process at call number `at`."""
    count = 0

    def act(_: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def kills(random: Random, folder: Path) -> Iterator[Fault]:
    """Kill some of several consecutive saves.

    Afterwards `load` must find the last completed save, or a later one.
    """
    path, last, killed = folder / "ck", 0, 0
    for step in range(1, int(random.integers(4, 7))):
        at = int(random.integers(1, 26)) if step > 1 else 0
        status, text = in_child(lambda: saving(path, step, int(random.integers(0, 2000)), killer(at)))  # noqa: B023
        killed += bool(status)
        if not status and text == "saved":
            last = step
        elif not status:
            yield Fault("kills: a save fails after a kill", text)
        _, found = in_child(lambda: looking(path))
        if not found.isdecimal() or not last <= int(found) <= step:
            number = "two kills" if killed > 1 else "one kill"
            yield Fault(f"kills: {number} lose the checkpoint", f"saved {last}, found {found} after step {step}")
            return


def writers(random: Random, folder: Path) -> Iterator[Fault]:
    """Let two jobs save to the same path at the same time, slowly.

    The checkpoint must load afterwards.
    """
    path = folder / "ck"
    in_child(lambda: saving(path, 1, 100, None))
    pids = []
    for step in (2, 3):
        seed, ends = int(random.integers(1 << 30)), random.random() < 0.3
        at = int(random.integers(1, 20)) if ends else 0
        pid = os.fork()
        if not pid:
            own, kill = np.random.default_rng(seed), killer(at)

            def slow(name: str, own: Random = own, kill: Callable[[str], None] = kill) -> None:
                kill(name)
                time.sleep(float(own.random()) * 0.02)

            try:
                saving(path, step, 1000, slow)
            except (OSError, ArgumentError, ValueError):
                os._exit(3)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    _, found = in_child(lambda: looking(path))
    if found not in {"1", "2", "3"}:
        yield Fault("writers: two jobs leave nothing that loads", found)


def readers(random: Random, folder: Path) -> Iterator[Fault]:
    """Load while another job saves repeatedly: every load must succeed."""
    path = folder / "ck"
    size = int(random.integers(1, 200_000))
    in_child(lambda: saving(path, 0, size, None))
    pid = os.fork()
    if not pid:
        mt.init()
        for step in range(40):
            mt.save(path, step=step, value=torch.full((size,), float(step)))
        os._exit(0)

    def look() -> str:
        mt.init()
        while os.path.exists(f"/proc/{pid}/exe"):  # noqa: PTH110 -- until it has ended
            found = mt.load(path)
            if not bool((found["value"] == found["step"]).all()):
                return "torn"
        return "right"

    _, text = in_child(look)
    os.waitpid(pid, 0)
    if text != "right":
        yield Fault("readers: a load beside a save fails", text)


FAMILIES = [
    Family(name="values", run=values),
    Family(name="strangers", run=strangers),
    Family(name="kills", run=kills, deadline_s=120.0),
    Family(name="writers", run=writers, deadline_s=120.0),
    Family(name="readers", run=readers, deadline_s=120.0),
    *STATES,
    *CRASHES,
]
SHOWS = {
    "data_01_save_deletes_folder.py": ["strangers: a file of others is gone"],
    "data_02_save_key_collision.py": ["values: names meet", "names: names meet"],
    "data_04_save_dtype.py": ["values: float8 saved, and not loaded", "values: big-endian changed"],
    "data_13_two_kills_lose_checkpoint.py": [
        "kills: two kills lose the checkpoint",
        "crash pairs: two kills lose the checkpoint",
    ],
    "data_15_two_jobs_one_path.py": [
        "writers: two jobs leave nothing that loads",
        "second writers: two jobs leave nothing that loads",
    ],
    "reader_04.py": ["values: names meet", "names: names meet"],
    "reader_05.py": ["values: big-endian changed"],
    "reader_18.py": ["values: float8 saved, and not loaded"],
}
TOPIC = Topic(name="checkpoints", program="evidence/checkpoints/main.py", families=FAMILIES, shows=SHOWS)

if __name__ == "__main__":
    with loaded() as environment:
        if environment is not None:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)  # noqa: S603
    sys.exit(main(TOPIC))

"""Inject kills, disk faults and power cuts at every file-system call of a save.

    python benchmarks/evidence/checkpoints/crashes.py [--only 'crash points,...'] [--cases 2]

main.py runs these families. This module is also a program of its own, which loads no framework. A library
(benchmarks/evidence/data/faults.c), loaded before libc, counts the calls that change the file system. At call number n
it kills the process, stops it, or fails the call. The crash points are enumerated, not drawn: case `number` of a family
uses the crash point and the starting point of that number, and tries all second crash points.
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.data.crashes import Call, Disk, Node
from benchmarks.evidence.data.faults import loaded
from benchmarks.evidence.support.cases import Family, Fault, Random, Topic, main
from safetensors.numpy import save_file

from multiring._frontend.checkpoint import saving
from multiring._frontend.lifecycle import init
from multiring.errors import MultiringError

NEVER = 1 << 30
STOP = -1
NOTES = "a week of it"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE)


# ---- processes ----


class Child:
    """A child process that runs `act` and sends its text to the parent."""

    def __init__(self, act: Callable[[], str]) -> None:
        self._hears, says = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(says)
            return
        try:
            text = act()
        except BaseException as error:  # noqa: BLE001 -- sent to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(says, text.encode(errors="replace")[:60000])
        os._exit(0)

    def stops(self) -> bool:
        """Wait until the process has stopped or ended; return whether it stopped."""
        return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED  # type: ignore[union-attr]

    def goes_on(self) -> None:
        """Continue the stopped process."""
        os.kill(self.pid, signal.SIGCONT)

    def ended(self) -> str:
        """Return the text of the process, or "killed" if a signal ended it."""
        with os.fdopen(self._hears, "rb") as file:
            text = file.read().decode(errors="replace")
        return "killed" if os.waitpid(self.pid, 0)[1] else text


def arm(below: Path, call: str, at: int, error: int, *, lasts: bool = False) -> None:
    """Inject a fault into this process's `at`-th call of a kind below a folder.

    An `error` of 0 kills this process, -1 stops it, and an errno makes the call fail. With `lasts`, all later calls
    fail too.
    """
    library = ctypes.CDLL(None)
    library.fault_arm(str(below).encode(), call.encode(), at, error)
    if lasts:
        library.fault_last()


def save(path: Path, step: int, size: int) -> None:
    """Save a step, with an array filled with the step's number."""
    value: Any = np.full(size, float(step)) if size else []
    saving.save(path, saving.Framework(), {"step": step, "value": value}, own={"step": step}, randomness=False)


def saver(path: Path, step: int, size: int, call: str = "change", at: int = NEVER, error: int = 0) -> Child:
    """Start a process that saves a step, with a fault at its `at`-th call.

    A successful process sends the text "saved" and the number of its calls.
    """

    def act() -> str:
        init()
        arm(path.parents[3], call, at, error)
        save(path, step, size)
        return f"saved {ctypes.CDLL(None).fault_seen()}"

    return Child(act)


def look(path: Path) -> str:
    """Return the step that `load` finds in this initialized process, or the error."""
    try:
        if not saving.is_saved(path):
            return "nothing"
        found = saving.load(path, saving.Framework(), {}, randomness=False)
    except (MultiringError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    is_whole = not len(found["value"]) or bool((found["value"] == found["step"]).all())
    own = found["own"] or {"step": found["step"]}
    return str(found["step"]) if is_whole and own == {"step": found["step"]} else "torn"


def looked(paths: Sequence[Path]) -> list[str]:
    """Return the result of `look` at each path, from a new process."""

    def act() -> str:
        init()
        return json.dumps([look(each) for each in paths])

    said = Child(act).ended()
    try:
        found: list[str] = json.loads(said)
    except ValueError:
        return [f"the reader said {said}"] * len(paths)
    return found


# ---- starting points of a save ----


class Start(NamedTuple):
    """The state of a folder before a save.

    Attributes:
        make: Creates the state below a folder. It returns the step that can be loaded, or 0 if there is none.
    """

    name: str
    make: Callable[[Path, Random], int]


def place_in(folder: Path) -> Path:
    """Return the path of a case's checkpoint."""
    return folder / "runs" / "ck"


def _nothing(_folder: Path, _random: Random) -> int:
    return 0


def _empty(folder: Path, _random: Random) -> int:
    place_in(folder).mkdir(parents=True)
    return 0


def _older(folder: Path, random: Random) -> int:
    if not saver(place_in(folder), 1, int(random.integers(0, 3000))).ended().startswith("saved"):
        raise RuntimeError("the first save fails")
    return 1


def _noted(folder: Path, random: Random) -> int:
    _older(folder, random)
    for name in ("metrics.csv", "epoch0/manifest.json", "data-0123456789abcdef/shared.json", "rank-00000.json"):
        file = place_in(folder) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(NOTES, "utf-8")
    return 1


def _linked(folder: Path, random: Random) -> int:
    _older(folder, random)
    place_in(folder).rename(folder / "elsewhere")
    place_in(folder).symlink_to(folder / "elsewhere")
    return 1


def _killed(folder: Path, random: Random) -> int:
    _older(folder, random)
    for _ in range(2):
        saver(place_in(folder), 1, 100, at=int(random.integers(1, 20))).ended()
    return 1


def write_02(place: Path, step: int) -> None:
    """Write a checkpoint in the format of multiring 0.2."""
    place.mkdir(parents=True)
    token = f"{step:016x}"
    save_file({"value": np.full(7, float(step))}, place / "shared.safetensors")
    shared = {"token": token, "arrays": True, "tree": {"step": step, "value": {"$numpy": "value"}}}
    own = {"token": token, "arrays": False, "tree": {"parts": {}, "own": {"step": step}}}
    manifest = {"format": 1, "token": token, "ranks": 1, "parts": ["step", "value"]}
    for name, told in (("shared", shared), ("rank-00000", own), ("manifest", manifest)):
        (place / f"{name}.json").write_text(json.dumps(told), "utf-8")


def _by_02(folder: Path, _random: Random) -> int:
    write_02(place_in(folder), 1)
    return 1


def _between_renamings_of_02(folder: Path, _random: Random) -> int:
    write_02(place_in(folder).with_name(".ck.old"), 1)
    half = place_in(folder).with_name(".ck.new")
    half.mkdir()
    (half / "shared.json").write_text("{", "utf-8")
    return 1


STARTS = [
    Start("an older save", _older),
    Start("nothing", _nothing),
    Start("one of 0.2", _by_02),
    Start("what killed saves left", _killed),
    Start("files of others", _noted),
    Start("an empty folder", _empty),
    Start("a link", _linked),
    Start("one of 0.2, between renamings", _between_renamings_of_02),
]


class Ground:
    """A starting point, which can be copied any number of times."""

    def __init__(self, number: int, random: Random, top: Path) -> None:
        self._top, self._copies = top, 0
        self.start = STARTS[number % len(STARTS)]
        self.number = number // len(STARTS)
        first = top / "first"
        (first / "runs").mkdir(parents=True)
        self.last = self.start.make(first, random)
        self.size = int(random.integers(0, 3000)) * int(random.integers(0, 2))
        said = saver(place_in(self.copy()), 2, self.size).ended()
        if not said.startswith("saved "):
            raise RuntimeError(f"a save without a fault fails: {said}")
        self.calls = int(said.removeprefix("saved "))

    def copy(self, of: Path | None = None) -> Path:
        """Return a new copy of the starting point, or of the folder `of`."""
        self._copies += 1
        folder = self._top / f"copy-{self._copies}"
        shutil.copytree(of or self._top / "first", folder, symlinks=True)
        if self.start.make is _linked:
            place_in(folder).unlink()
            place_in(folder).symlink_to(folder / "elsewhere")
        return folder

    def right_after(self, folder: Path) -> Iterator[str]:
        """Yield the faults found after a save that met no fault.

        The save must be the only one in the folder, and foreign files must keep their content.
        """
        path = place_in(folder)
        if self.start.make is _noted:
            names = ("metrics.csv", "epoch0/manifest.json", "data-0123456789abcdef/shared.json", "rank-00000.json")
            yield from (f"{name} of others is lost" for name in names if (path / name).read_text("utf-8") != NOTES)
            return
        left = [each for each in path.iterdir() if each.name.startswith("data-")]
        full = [each for each in left if any(one.stat().st_size for one in each.iterdir())]
        if len(full) != 1 and self.start.make is not _between_renamings_of_02:
            yield f"{len(full)} saves lie there"


def _with_ground(
    case: Callable[[Ground, Random], Iterator[Fault]], sign: str
) -> Callable[[Random, Path], Iterator[Fault]]:
    """Return a family's function, which runs a case on a starting point.

    The name of the case's folder is the case's number.
    """

    def run(random: Random, folder: Path) -> Iterator[Fault]:
        # No fault here needs a disk, and a save to a disk waits for the disk a dozen times.
        shared = Path("/dev/shm")  # noqa: S108 -- the folder in it has a name of its own
        with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else folder) as name:
            ground = Ground(int(folder.name), random, Path(name).resolve())
            for fault in case(ground, random):
                yield Fault(f"{sign}: {fault.sign}", f"over {ground.start.name}, {ground.calls} calls: {fault.text}")

    return run


# ---- the families ----


def _followed(ground: Ground, folders: Sequence[Path]) -> Iterator[Fault]:
    """Save once more to each folder: only this save may remain, and it must load."""

    def act() -> str:
        init()
        for each in folders:
            save(place_in(each), 9, 5)
        return "saved"

    said = Child(act).ended()
    if said != "saved":
        yield Fault("the next save fails", said)
        return
    for folder, found in zip(folders, looked(list(map(place_in, folders))), strict=True):
        if found != "9":
            yield Fault("the next save does not count", found)
        for text in ground.right_after(folder):
            yield Fault("the next save leaves or loses files", text)


def crash_points(ground: Ground, _random: Random) -> Iterator[Fault]:
    """Kill a save at each of its calls.

    The previous or the new save must load, and the next save must work.
    """
    folders = [ground.copy() for _ in range(ground.calls + 1)]
    said = [saver(place_in(each), 2, ground.size, at=at).ended() for at, each in enumerate(folders, 1)]
    for at, (text, found) in enumerate(zip(said, looked(list(map(place_in, folders))), strict=True), 1):
        allowed = {"2"} if text.startswith("saved") else {str(ground.last) if ground.last else "nothing", "2"}
        if found not in allowed or (text == "killed") is (at > ground.calls):
            yield Fault("one kill loses the checkpoint", f"killed at {at}: {text}, found {found}")
    yield from _followed(ground, folders)


def crash_pairs(ground: Ground, _random: Random) -> Iterator[Fault]:
    """Kill a save at one call, and the next save at each of its calls."""
    at = ground.number % ground.calls + 1
    first = ground.copy()
    saver(place_in(first), 2, ground.size, at=at).ended()
    said = saver(place_in(ground.copy(first)), 3, ground.size).ended()
    if not said.startswith("saved "):
        yield Fault("a save fails after a kill", f"killed at {at}: {said}")
        return
    calls = int(said.removeprefix("saved "))
    folders = [ground.copy(first) for _ in range(calls)]
    for second, each in enumerate(folders, 1):
        saver(place_in(each), 3, ground.size, at=second).ended()
    before, *after = looked([place_in(each) for each in (first, *folders)])
    for second, found in enumerate(after, 1):
        if before not in {str(ground.last) if ground.last else "nothing", "2"} or found not in {before, "3"}:
            text = f"killed at {at}, found {before}; killed at {second} of {calls}, found {found}"
            yield Fault("two kills lose the checkpoint", text)
    yield from _followed(ground, folders)


def disk_faults(ground: Ground, random: Random) -> Iterator[Fault]:
    """Make each call of a save fail, alone or together with all later calls.

    A failed save must not report success.
    """
    error, lasts = ERRORS[ground.number % len(ERRORS)], bool(random.integers(2))
    folders = [ground.copy() for _ in range(ground.calls)]
    said = []
    for at, folder in enumerate(folders, 1):

        def act(folder: Path = folder, at: int = at) -> str:
            init()
            arm(folder, "change", at, error, lasts=lasts)
            try:
                save(place_in(folder), 2, ground.size)
            except OSError as failure:
                return f"told {failure}"
            return "saved"

        said.append(Child(act).ended())
    for at, (text, found) in enumerate(zip(said, looked(list(map(place_in, folders))), strict=True), 1):
        what = f"{os.strerror(error)}{' from then on' if lasts else ''} at {at}: {text}; found {found}"
        if text == "saved" and found != "2":
            yield Fault("success is told of a save that failed", what)
        elif text != "saved" and not text.startswith("told "):
            yield Fault("another error than the disk's", what)
        elif found not in {str(ground.last) if ground.last else "nothing", "2"}:
            yield Fault("a failed save loses the checkpoint", what)
    yield from _followed(ground, folders)


def second_writers(ground: Ground, _random: Random) -> Iterator[Fault]:
    """Stop a save at one call while another job saves, then continue the first save.

    The other save completes, or it is killed at each of its calls in turn.
    """
    at = ground.number % ground.calls + 1
    folders = []
    for second in range(1, NEVER):
        folder = ground.copy()
        folders.append(folder)
        path = place_in(folder)
        slow = saver(path, 2, ground.size, at=at, error=STOP)
        if not slow.stops():
            yield Fault("a save ends before its time", slow.ended())
            return
        said = saver(path, 3, ground.size, at=second).ended()
        (between,) = looked([path])
        slow.goes_on()
        at_last, (after,) = slow.ended(), looked([path])
        what = (
            f"one stopped at {at}, the other at {second}: {said}, found {between}; then {at_last[:200]}, found {after}"
        )
        is_other_saved, is_saved = said.startswith("saved"), at_last.startswith("saved")
        allowed = {"3"} if is_other_saved else {str(ground.last) if ground.last else "nothing", "2", "3"}
        if between not in allowed:
            yield Fault("two jobs leave nothing that loads", what)
        if after not in ({"2", "3"} if is_saved else {between, "2"}):
            yield Fault("two jobs leave nothing that loads", what)
        if not is_other_saved and said != "killed":
            yield Fault("a save beside another one fails", what)
        if not is_saved and "was removed by another process" not in at_last:
            yield Fault("a save that another one overtakes fails", what)
        if said != "killed":
            break
    yield from _followed(ground, folders)


def stopped_readers(ground: Ground, _random: Random) -> Iterator[Fault]:
    """Stop a load at each file that it opens, run one to three saves, and continue it."""
    first = ground.copy()
    saver(place_in(first), 2, ground.size).ended()
    for at in range(1, NEVER):
        path = place_in(ground.copy(first))

        def act(path: Path = path, at: int = at) -> str:
            init()
            arm(path.parents[3], "open", at, STOP)
            return look(path)

        reader = Child(act)
        stops = reader.stops()
        step = 2
        for _ in range(1 + (ground.number + at) % 3 if stops else 0):
            step += 1
            saver(path, step, ground.size).ended()
        if stops:
            reader.goes_on()
        found = reader.ended()
        if found not in {"2", str(step)}:
            yield Fault("a load beside a save fails", f"stopped at {at}, saved until {step}: found {found}")
        if not stops:
            break


def power_cuts(ground: Ground, random: Random) -> Iterator[Fault]:
    """Simulate a power cut after each call of two saves.

    The disk keeps only the synced data, all data, or a random part of the unsynced data.
    """
    if ground.start.make is _linked:  # the simulated disk has no links
        return
    folder = ground.copy()
    path = place_in(folder)
    log = folder.parent / "calls"

    def act() -> str:
        init()
        with log.open("wb") as file:
            ctypes.CDLL(None).record_below(str(folder).encode(), file.fileno())
            save(path, 2, ground.size)
            os.fsync(os.open(folder, os.O_RDONLY))  # This call marks the end of the first save in the log.
            save(path, 3, ground.size)
            ctypes.CDLL(None).record_below(b"\0", -1)
        return "saved"

    disk = Disk()
    disk.root = _node_of(folder)
    said = Child(act).ended()
    if said != "saved":
        yield Fault("a save without a fault fails", said)
        return
    calls = list(_calls_in(log.read_bytes(), folder))
    ends = next(at for at, each in enumerate(calls) if each.kind == "fsync" and each.path == ".")
    left: list[Path] = []
    allowed: list[set[str]] = []
    for done in range(len(calls) + 1):
        for way in ("all", "synced", "any", "any"):
            place = folder.parent / f"cut-{len(left)}"
            _leave(disk.root, place, way, random)
            left.append(place)
            before = str(ground.last) if ground.last else "nothing"
            allowed.append({before, "2"} if done < ends else {"2", "3"} if done < len(calls) else {"3"})
        if done < len(calls):
            disk.do(calls[done])
    for number, (found, right) in enumerate(zip(looked(list(map(place_in, left))), allowed, strict=True)):
        if found not in right:
            text = f"after {number // 4} of {len(calls)} calls: found {found}, want one of {sorted(right)}"
            yield Fault("a power cut loses the checkpoint", text)


def _calls_in(log: bytes, folder: Path) -> Iterator[Call]:
    while log:
        line, _, log = log.partition(b"\n")
        kind, path, other, offset, size = line.decode().split("\t")
        within, elsewhere = (os.path.relpath(each, folder) if each else "" for each in (path, other))
        yield Call(kind, within, elsewhere, int(offset), log[: int(size)])
        log = log[int(size) :]


def _node_of(place: Path) -> Node:
    """Return a path's content as a node of the simulated disk, fully synced."""
    if place.is_dir():
        entries = {each.name: _node_of(each) for each in place.iterdir()}
        return Node(is_folder=True, entries=entries, synced_entries=dict(entries))
    return Node(is_folder=False, content=bytearray(place.read_bytes()), synced=place.read_bytes())


def _leave(node: Node, place: Path, way: str, random: Random) -> None:
    """Write the files that a power cut leaves.

    If `way` is "all", keep everything. If it is "synced", keep synced content only. If "any", choose for each file.
    """

    def is_all() -> bool:
        return way == "all" or (way == "any" and bool(random.integers(2)))

    place.mkdir()
    for name, each in (node.entries if is_all() else node.synced_entries).items():
        if each.is_folder:
            _leave(each, place / name, way, random)
        else:
            (place / name).write_bytes(each.content if is_all() else each.synced)


FAMILIES = [
    Family(name=name, run=_with_ground(case, name), deadline_s=600.0, case_s=4.0)
    for name, case in (
        ("crash points", crash_points),
        ("crash pairs", crash_pairs),
        ("disk faults", disk_faults),
        ("second writers", second_writers),
        ("stopped readers", stopped_readers),
        ("power cuts", power_cuts),
    )
]

if __name__ == "__main__":
    with loaded() as environment:
        if environment is not None:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)  # noqa: S603
    program = "evidence/checkpoints/crashes.py"
    sys.exit(main(Topic(name="checkpoints-crashes", program=program, families=FAMILIES, shows={})))

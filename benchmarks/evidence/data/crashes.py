"""Check that a pack or a cache never serves corrupt data after a machine crash.

    .venv/bin/python benchmarks/evidence/data/crashes.py [--only packing,staging,caching]

The program runs an operation once. A library loaded before libc records the calls that change files. Then the program
simulates a crash after each call, in four ways:

- The disk holds everything that was called.
- The disk holds all names, but of the files' contents only the synced parts.
- The disk holds only synced names and synced contents.
- The disk holds everything except half of the newest write.

The program writes each resulting folder and reads it again as the next process would. A pack that was reported as
complete must be there, whole, in all of these folders.
"""

import contextlib
import copy
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.data.faults import ACTS, QUOTA, Ground, ground_and_folder, loaded
from benchmarks.evidence.support.claims import Claim, report

from multiring.data import Dataset
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.verifying import damages
from multiring.data.readers.storage import LocalStorage
from multiring.errors import DataError

WAYS = ("all", "contents as synced", "only what was synced", "half of a write")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed the file system. Its paths are relative to the folder."""

    kind: str
    path: str
    other: str
    offset: int
    data: bytes


@dataclass(slots=True)
class Node:
    """A file, or a folder with its entries, and the part of it that was synced."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    entries: dict[str, "Node"] = field(default_factory=dict)
    synced: bytes = b""
    synced_entries: dict[str, "Node"] = field(default_factory=dict)


def recorded(act: str, ground: Ground, folder: Path) -> list[Call]:
    """Run an operation and return its file-system calls."""
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                ctypes.CDLL(None).record_below(str(folder).encode(), log.fileno())
                ACTS[act](ground, folder)
                os._exit(0)
            os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError(f"{act} failed while it was recorded")
        log.seek(0)
        found = []
        while line := log.readline():
            kind, path, other, offset, size = line.decode().rstrip("\n").split("\t")
            within, elsewhere = (os.path.relpath(each, folder) if each else "" for each in (path, other))
            found.append(Call(kind, within, elsewhere, int(offset), log.read(int(size))))
        return found


class Disk:
    """A simulated file system: its content after some calls, and the synced part."""

    def __init__(self) -> None:
        self.root = Node(is_folder=True)

    def _place(self, path: str) -> tuple[dict[str, Node], str]:
        *folders, name = Path(path).parts
        node = self.root
        for each in folders:
            node = node.entries[each]
        return node.entries, name

    def _node(self, path: str) -> Node:
        if path == ".":
            return self.root
        entries, name = self._place(path)
        return entries[name]

    def do(self, call: Call) -> None:
        """Apply a call to the file system."""
        if call.kind == "write":
            content = self._node(call.path).content
            content.extend(bytes(max(0, call.offset + len(call.data) - len(content))))
            content[call.offset : call.offset + len(call.data)] = call.data
        elif call.kind == "fsync":
            node = self._node(call.path)
            node.synced, node.synced_entries = bytes(node.content), dict(node.entries)
        elif call.kind in {"rename", "link"}:
            entries, name = self._place(call.path)
            others, other = self._place(call.other)
            others[other] = entries[name]
            if call.kind == "rename":
                del entries[name]
        else:
            entries, name = self._place(call.path)
            if call.kind in {"unlink", "rmdir"}:
                del entries[name]
            elif call.kind == "mkdir":
                entries[name] = Node(is_folder=True)
            else:
                node = entries.setdefault(name, Node(is_folder=False))
                if call.kind == "truncate":
                    node.content.clear()

    def leave(self, folder: Path, way: str) -> None:
        """Write the files that a crash of the simulated disk leaves."""
        _leave(self.root, folder, way)


def _leave(node: Node, place: Path, way: str) -> None:
    place.mkdir(mode=0o700)
    entries = node.synced_entries if way == "only what was synced" else node.entries
    for name, each in entries.items():
        if each.is_folder:
            _leave(each, place / name, way)
        else:
            (place / name).write_bytes(each.content if way in {"all", "half of a write"} else each.synced)


def outcome(act: str, ground: Ground, folder: Path, *, is_over: bool) -> str:
    """Return what the next process finds in the folder.

    The outcomes in capitals are faults, such as "WRONG" if the cache serves damaged data. A cache that reports the
    damage and fetches the block again is right.
    """
    if act == "packing":
        target = folder / "made"
        if not target.exists():
            return "LOST" if is_over else "nothing"
        try:
            found = list(damages(Dataset(str(target)), lambda *_: None))
        except DataError:
            return "UNREADABLE"
        return "DAMAGED" if found else "whole"
    told: list[str] = []
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(folder, QUOTA, told.append), memory_bytes=0)
    if any(storage.block(*each) != ground.right(*each) for each in storage.each_block()):
        return "WRONG"
    return "told, and fetched again" if told else "whole"


def crashes(act: str) -> Iterator[Claim]:
    """Simulate a crash after each call of an operation, in every way."""
    with ground_and_folder() as (ground, folder):
        calls = recorded(act, ground, folder)
        shutil.rmtree(folder)
        disk, ends = Disk(), Counter[str]()
        for number in range(len(calls) + 1):
            for way in WAYS:
                left = disk
                if way == "half of a write":
                    if not number or calls[number - 1].kind != "write":
                        continue
                    left = copy.deepcopy(disk)
                    last = calls[number - 1]
                    content = left._node(last.path).content  # noqa: SLF001 -- of this file's
                    del content[last.offset + len(last.data) // 2 :]
                left.leave(folder, way)
                ends[outcome(act, ground, folder, is_over=number == len(calls))] += 1
                shutil.rmtree(folder)
            if number < len(calls):
                disk.do(calls[number])
        folder.mkdir()
    kinds = Counter(each.kind for each in calls)
    yield Claim(
        text=f"{act}: the machine goes down after any of {len(calls)} calls, in {len(WAYS)} ways: nothing damaged is "
        "served, and what was reported as made is there",
        figure=f"{dict(ends)}; calls {dict(kinds)}",
        holds=len(calls) > 10 and not any(each.isupper() for each in ends),
    )


CLAIMS = {act: (lambda _share, act=act: crashes(act)) for act in ("packing", "staging", "caching")}

if __name__ == "__main__":
    with loaded() as environment:
        if environment is not None:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)  # noqa: S603
    sys.exit(report(CLAIMS, __doc__ or ""))

"""Inject faults into caches, packs and peers, and check that no data gets corrupt.

    .venv/bin/python benchmarks/evidence/data/faults.py [--only kills,calls,bits,disk,source,peers] [--short]

Each trial is a process that stages, caches, packs or serves. It is killed at a random moment. Or it fails, or is
killed, at its n-th open, write, rename, link, unlink, fsync or mkdir below the trial's folder. A library loaded before
libc injects these faults. After each trial, other processes read everything again and compare it with the expected
data. Nothing may hang or stay locked.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import Claim, report

from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._settings import inherited_environment
from multiring.data import Dataset, Loader
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.verifying import damages
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.exchange import Exchange
from multiring.data.peers.owners import Owners
from multiring.data.peers.words import BlockRequest
from multiring.data.readers.manifest import BLOCK_BYTES
from multiring.data.readers.storage import LocalStorage, open_storage
from multiring.errors import DataError, MultiringError, SourceTimeoutError

SOURCE = Path(__file__).with_suffix(".c")
SECRET = b"data faults"
DEADLINE_S = 20.0
CALLS = ("open", "write", "rename", "link", "unlink", "fsync", "mkdir")
QUOTA = 1 << 30
SAMPLES = 28


@dataclass(frozen=True, slots=True)
class Ground:
    """The data set of a trial, and the content of its shards."""

    files: Path
    pack: Path
    shards: list[bytes]

    @classmethod
    def made(cls, folder: Path) -> "Ground":
        """Create a data set of 7 MiB and a pack of it."""
        (folder / "d").mkdir()
        for number in range(SAMPLES):
            array = np.random.default_rng(number).integers(0, 255, 1 << 18, dtype=np.uint8)
            np.save(folder / "d" / f"{number:03}.npy", array)
        packing(folder / "d", folder / "pack")
        return cls(folder / "d", folder / "pack", [each.read_bytes() for each in sorted(folder.glob("pack/*.tar"))])

    def right(self, shard: int, block: int) -> bytes:
        """Return the expected content of a block."""
        return self.shards[shard][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def packing(files: Path, target: Path) -> None:
    """Create a pack of the files."""
    source = Dataset(str(files), format="npy-files").source
    pack(source, SAMPLES, target, PackOptions(shard_bytes=3 << 20), lambda *_: None)


# ---- operations that get faults ----


def stages(ground: Ground, folder: Path) -> None:
    """Stage the pack."""
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(folder, QUOTA, quiet), memory_bytes=0)
    Exchange(storage, Owners([1.0]), 0, [None], quiet).stage(lambda *_: None)


def caches(ground: Ground, folder: Path) -> None:
    """Read three epochs through a cache for half of the pack, so it evicts blocks."""
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(folder, 4 << 20, quiet), memory_bytes=0)
    loader = Loader(Dataset(storage), 4)
    for _ in range(3):
        for batch in loader:
            for row, name in enumerate(batch["name"]):
                want = np.load(ground.files / f"{name.removesuffix('.npy')}.npy", mmap_mode="r")
                if batch["array"][row].tobytes() != want.tobytes():
                    os._exit(77)  # a damaged block was served
    loader.close()


def packs(ground: Ground, folder: Path) -> None:
    """Pack the data set."""
    packing(ground.files, folder / "made")


def serves(ground: Ground, folder: Path) -> None:
    """Serve blocks through sockets to a client in the same process."""
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(folder, QUOTA, quiet), memory_bytes=0)
    exchange = Exchange(storage, Owners([1.0]), 0, [None], quiet)
    server = BlockServer(SECRET, "127.0.0.1", exchange.give, quiet)
    peer = BlockClient(server.address, SECRET, quiet, 5.0)
    for shard, block in storage.each_block():
        found = peer.block(BlockRequest(storage.key, shard, block))
        if found is not None and found != ground.right(shard, block):
            os._exit(77)
    peer.close()
    server.close()


ACTS: dict[str, Callable[[Ground, Path], None]] = {
    "staging": stages,
    "caching": caches,
    "packing": packs,
    "serving": serves,
}


def quiet(_: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a file-system call. If `error` is 0, the fault kills the process."""

    call: str
    at: int
    error: int


def trial(act: str, ground: Ground, folder: Path, *, fault: Fault | None = None, kill_after_s: float = -1) -> str:
    """Run an operation in a process; return how the process ended.

    The outcomes are "done", "told" (it raised an error), "killed", "hung" and "wrong". The prefix "fired-" says that
    the fault occurred.
    """
    ready, went = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            os.close(ready)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            library = ctypes.CDLL(None)
            if fault is not None:
                library.fault_arm(str(folder).encode(), fault.call.encode(), fault.at, fault.error)
            try:
                ACTS[act](ground, folder)
                code = 0
            except (MultiringError, OSError):
                code = 3
            finally:
                if fault is not None and library.fault_fired():
                    os.write(went, b"f")
        os._exit(code)
    os.close(went)
    if kill_after_s >= 0:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + DEADLINE_S
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(ready)
            return "hung"
        time.sleep(0.002)
    fired = "fired-" if os.read(ready, 1) else ""
    os.close(ready)
    status = found[1]
    if os.WIFSIGNALED(status):
        return f"{fired}killed"
    return fired + {0: "done", 3: "told", 77: "wrong"}.get(os.WEXITSTATUS(status), f"exit {os.WEXITSTATUS(status)}")


def is_right(act: str, ground: Ground, folder: Path) -> bool:
    """Return whether the files that a trial left are whole and usable at once."""
    if act == "packing":
        target = folder / "made"
        if target.exists() and list(damages(Dataset(str(target)), lambda *_: None)):
            return False
        shutil.rmtree(target, ignore_errors=True)
        packs(ground, folder)
        return not list(damages(Dataset(str(target)), lambda *_: None))
    told: list[str] = []
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(folder, QUOTA, told.append), memory_bytes=0)
    same = all(storage.block(*each) == ground.right(*each) for each in storage.each_block())
    return same and not told  # The published blocks must be whole without a second fetch.


def kills(share: int) -> Iterator[Claim]:
    """Kill each operation at random moments, until enough were killed while running."""
    for act in ACTS:
        ends, bad, count = Counter[str](), 0, max(2, 200 // share)
        with ground_and_folder() as (ground, root):
            usual_s = usual(act, ground, root)
            for number in range(5 * count):
                folder = root / str(number % 4)  # Some trials start with the files that an earlier trial left.
                folder.mkdir(exist_ok=True)
                moment = float(np.random.default_rng(number).random()) * usual_s
                ends[trial(act, ground, folder, kill_after_s=moment)] += 1
                bad += not is_right(act, ground, folder)
                if number % 4 == 3:
                    for each in range(4):
                        shutil.rmtree(root / str(each))
                if ends["killed"] == count:
                    break
        yield Claim(
            text=f"{act}, kill -9 at {count} random moments: what is left is whole",
            figure=f"{dict(ends)}, {bad} not whole",
            holds=not bad and not ends["hung"] and not ends["wrong"] and ends["killed"] == count,
        )


def usual(act: str, ground: Ground, root: Path) -> float:
    """Return the shortest of three undisturbed runs of an operation, in seconds."""
    found = []
    for number in range(3):
        folder = root / f"usual{number}"
        folder.mkdir()
        began = time.monotonic()
        trial(act, ground, folder)
        found.append(time.monotonic() - began)
        shutil.rmtree(folder)
    return min(found)


def calls(share: int) -> Iterator[Claim]:
    """Make each operation fail, or kill it, at every file-system call of each kind."""
    for act in ACTS:
        ends, bad, fired = Counter[str](), 0, Counter[str]()
        with ground_and_folder() as (ground, root):
            for call in CALLS:
                for error in (0, errno.ENOSPC, errno.EIO):
                    for at in range(1, 100, share):
                        folder = root / secrets.token_hex(4)
                        folder.mkdir()
                        end = trial(act, ground, folder, fault=Fault(call, at, error))
                        did = "killed" in end if not error else end.startswith("fired-")
                        ends[end.removeprefix("fired-")] += 1
                        bad += not is_right(act, ground, folder)
                        shutil.rmtree(folder)
                        if not did:
                            break  # the operation makes fewer calls of this kind
                        fired[call] += 1
        holds = (
            not bad
            and not ends["hung"]
            and not ends["wrong"]
            and sum(fired.values()) > 0
            and all("exit" not in each for each in ends)
        )
        yield Claim(
            text=f"{act}, at each call killed, ENOSPC, EIO",
            figure=f"fired {dict(fired)}: {dict(ends)}, {bad} not whole",
            holds=holds,
        )


def bits(share: int) -> Iterator[Claim]:
    """Flip bits in cached blocks and in data on a socket."""
    count = max(10, 200 // share)
    with ground_and_folder() as (ground, root):
        stages(ground, root)
        found = wrong = 0
        for number in range(count):
            generator = np.random.default_rng(number)
            files = [each for each in root.rglob("*") if each.name.isdecimal() and each.is_file()]
            file = files[int(generator.integers(len(files)))]
            content = bytearray(file.read_bytes())
            content[int(generator.integers(24, len(content)))] ^= 1 << int(generator.integers(8))
            file.write_bytes(content)
            cache = BlockCache(root, QUOTA, quiet)
            storage = CachedStorage(LocalStorage(ground.pack), cache, memory_bytes=0)
            wrong += not all(storage.block(*each) == ground.right(*each) for each in storage.each_block())
            found += cache.counts.damaged
        yield Claim(
            text=f"{count} bits flipped in cached blocks: all found",
            figure=f"{found} found, {wrong} served",
            holds=found == count and not wrong,
        )
        storage = CachedStorage(LocalStorage(ground.pack), BlockCache(root, QUOTA, quiet))
        server = BlockServer(SECRET, "127.0.0.1", Exchange(storage, Owners([1.0]), 0, [None], quiet).give, quiet)
        ends = Counter(flipped(server.address, storage.key, ground, seed) for seed in range(count))
        server.close()
        yield Claim(
            text=f"{count} bits flipped above TCP: all found", figure=str(dict(ends)), holds=ends == {"found": count}
        )


def flipped(address: TcpAddress, key: str, ground: Ground, seed: int) -> str:
    """Fetch a block through a relay that flips one bit of the server's data."""
    relay = socket.create_server(("127.0.0.1", 0))
    place = int(np.random.default_rng(seed).integers(600, BLOCK_BYTES))
    threading.Thread(target=_relay, args=(relay, address, place, 1 << seed % 8), daemon=True).start()
    told: list[str] = []
    peer = BlockClient(TcpAddress("127.0.0.1", relay.getsockname()[1]), SECRET, told.append, 5.0)
    data = peer.block(BlockRequest(key, 0, 0))
    peer.close()
    relay.close()
    return "found" if data is None and told else "right" if data == ground.right(0, 0) else "served"


def _relay(listener: socket.socket, address: TcpAddress, place: int, mask: int) -> None:
    with contextlib.suppress(OSError), listener.accept()[0] as near:
        far = socket.create_connection((address.host, address.port))

        def back() -> None:
            done = 0
            with contextlib.suppress(OSError):
                while data := bytearray(far.recv(1 << 16)):
                    if done <= place < done + len(data):
                        data[place - done] ^= mask
                    done += len(data)
                    near.sendall(data)
                near.shutdown(socket.SHUT_WR)

        threading.Thread(target=back, daemon=True).start()
        while data := near.recv(1 << 16):
            far.sendall(data)
        far.close()


def disk(share: int) -> Iterator[Claim]:
    """Cache a pack on a full disk."""
    del share
    if os.getuid():
        yield Claim(text="a full disk: training goes on", figure="not tried: needs root", holds=False)
        return
    with ground_and_folder() as (ground, root):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", str(root)], check=True)  # noqa: S603, S607
        try:
            told: list[str] = []
            storage = CachedStorage(LocalStorage(ground.pack), BlockCache(root, QUOTA, told.append), memory_bytes=0)
            same = all(storage.block(*each) == ground.right(*each) for _ in range(2) for each in storage.each_block())
        finally:
            subprocess.run(["umount", str(root)], check=True)  # noqa: S603, S607
        yield Claim(
            text="a disk of 3 MiB for 7 MiB: all is read, and it is told once",
            figure=f"right {same}, told {told}",
            holds=same and len(told) == 1 and "No space left" in told[0],
        )


def source(share: int) -> Iterator[Claim]:
    """Read from a source that is gone, and from a source that does not answer."""
    del share
    with ground_and_folder() as (ground, root):
        storage = CachedStorage(LocalStorage(ground.pack), BlockCache(root, QUOTA, quiet), memory_bytes=0)
        storage.block(0, 0)
        for each in ground.pack.glob("*.tar"):
            each.unlink()
        kept = storage.block(0, 0) == ground.right(0, 0)
        try:
            CachedStorage.block(storage, 1, 0)
            text = ""
        except DataError as error:
            text = str(error)
        yield Claim(
            text="a source that is gone: what is kept is read, the rest is an error that names the file",
            figure=text,
            holds=kept and "shard-00001.tar" in text,
        )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        try:
            open_storage(f"http://127.0.0.1:{silent.getsockname()[1]}/x", timeout_s=1.0).size("manifest.json")
            text = ""
        except SourceTimeoutError as error:
            text = str(error)
        passed = time.monotonic() - began
    yield Claim(
        text="a source that stalls: named within its time-out of 1 s",
        figure=f"{passed:.2f} s: {text}",
        holds=bool(text) and passed < 3.0,
    )


def peers(share: int) -> Iterator[Claim]:
    """Kill or stop another host while this host stages from it."""
    for name, sent in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        right, told, longest, count = 0, 0, 0.0, max(2, 20 // share)
        for seed in range(count):
            with ground_and_folder() as (ground, root):
                began = time.monotonic()
                is_right_now, said = chain(ground, root, sent, float(np.random.default_rng(seed).random()) * 0.05)
                longest = max(longest, time.monotonic() - began)
                right, told = right + is_right_now, told + said
        yield Claim(
            text=f"a host {name} in mid-transfer, {count} times: the others have all",
            figure=f"{right} right, {told} told of it, at most {longest:.1f} s",
            holds=right == count and longest < DEADLINE_S,
        )


def chain(ground: Ground, root: Path, sent: signal.Signals, after_s: float) -> tuple[bool, bool]:
    """Stage from another process, which gets a signal during the transfer.

    Returns:
        Whether all blocks are right, and whether the cache or the peer reported the failure.
    """
    ready, went = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            storage = CachedStorage(LocalStorage(ground.pack), BlockCache(root / "other", QUOTA, quiet))
            server = BlockServer(SECRET, "127.0.0.1", Exchange(storage, Owners([1.0]), 0, [None], quiet).give, quiet)
            os.write(went, f"{server.address.port}\n".encode())
            time.sleep(60)
        os._exit(0)
    address = TcpAddress("127.0.0.1", int(os.read(ready, 16)))
    told: list[str] = []
    peer = BlockClient(address, SECRET, told.append, 1.0)
    storage = CachedStorage(LocalStorage(ground.pack), BlockCache(root / "own", QUOTA, told.append), memory_bytes=0)
    exchange = Exchange(storage, Owners([1.0, 1.0]), 0, [None, peer], told.append)
    storage.fetch_by(exchange.fetch)
    timer = threading.Timer(after_s, os.kill, (pid, sent))
    timer.start()
    exchange.stage(lambda *_: None)
    timer.join()
    same = all(storage.block(*each) == ground.right(*each) for each in storage.each_block())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(went)
    peer.close()
    return same, bool(told)


@contextlib.contextmanager
def ground_and_folder() -> Iterator[tuple[Ground, Path]]:
    """Yield a data set and an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "ground").mkdir()
        (Path(name) / "work").mkdir(mode=0o700)
        yield Ground.made(Path(name) / "ground"), Path(name) / "work"


CLAIMS = {"kills": kills, "calls": calls, "bits": bits, "disk": disk, "source": source, "peers": peers}


@contextlib.contextmanager
def loaded() -> Iterator[dict[str, str] | None]:
    """Yield an environment that loads the fault library, or None if it is loaded."""
    if hasattr(ctypes.CDLL(None), "fault_arm"):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-pthread"]
        subprocess.run(words, check=True)  # noqa: S603 -- our own words
        yield {**inherited_environment(), "LD_PRELOAD": str(library)}


def main() -> int:
    """Load the library and print all claims."""
    with loaded() as environment:
        if environment is not None:
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode  # noqa: S603
    return report(CLAIMS, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())

"""Loaders with process workers: random programs, and objects that are bound to one process, place or membership."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.evidence.data_files.loaders import loaders

from multiring._simulator.measured_feeding import measured_feeding_of
from multiring.data import Dataset, Loader, Workers
from multiring.data.feeding.processes import ProcessWorkers
from multiring.errors import DataError


def rows(folder: Path, count: int) -> str:
    np.save(folder / "a.npy", np.repeat(np.arange(count)[:, None], 64, 1))
    return str(folder)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_get_their_rows_and_end(tmp_path: Path, seed: int) -> None:
    """Random programs mix iterations, failures, places and closing; the tests below are single cases of them."""
    assert list(loaders(np.random.default_rng(seed), tmp_path)) == []


def test_a_loader_of_fewer_ranks_has_larger_batches(tmp_path: Path) -> None:
    workers = Workers(2, processes=True, context="fork")
    loader = Loader(Dataset(rows(tmp_path, 640), shuffle="none"), 64, rank=0, ranks=4, workers=workers)
    first = iter(loader)
    assert next(first)["array"][:, 0].tolist() == list(range(0, 64, 4))
    loader.place(0, 1)
    found = [batch["array"] for batch in loader]
    assert [each[:, 0].tolist() for each in found] == [list(range(begin, begin + 64)) for begin in range(64, 640, 64)]
    assert all((each == each[:, :1]).all() for each in found)
    assert next(first)["array"][:, 0].tolist() == list(range(64, 128, 4)), "the older iteration did not keep its place"
    loader.close()


def nothing_at_37(record: dict[str, Any], generator: np.random.Generator) -> Any:
    del generator
    return None if record["array"][0] == 37 else record


def with_a_lock(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    del generator
    return {**record, "field": sys.stdout}  # cannot be pickled


def test_failed_batches_give_their_memory_back(tmp_path: Path) -> None:
    data = Dataset(rows(tmp_path, 640), shuffle="none", transform=nothing_at_37)
    loader = Loader(data, 16, workers=Workers(1, processes=True, context="fork"))
    for _ in range(12):
        with pytest.raises(DataError):
            list(loader)
    crew = loader._workers
    assert isinstance(crew, ProcessWorkers)
    assert len(crew._areas) <= 8
    loader.close()


def test_answers_that_cannot_be_sent_are_an_error_of_their_batch(tmp_path: Path) -> None:
    data = Dataset(rows(tmp_path, 32), shuffle="none", transform=with_a_lock)
    loader = Loader(data, 16, workers=Workers(1, processes=True, context="fork"))
    with pytest.raises(DataError, match="cannot be pickled"):
        list(loader)
    loader.close()


def test_workers_that_cannot_be_replaced_are_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead worker cannot be replaced, for example because the table of descriptors is full."""
    loader = Loader(
        Dataset(rows(tmp_path, 640), shuffle="none"), 16, workers=Workers(1, processes=True, context="fork")
    )
    batches = iter(loader)
    next(batches)
    crew = loader._workers
    assert isinstance(crew, ProcessWorkers)

    def begun(number: int) -> Any:
        raise OSError(24, f"Too many open files, worker {number}")

    monkeypatch.setattr(crew, "_begun", begun)
    os.kill(crew._workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(OSError, match="Too many open files"):
        list(batches)
    assert len(list(loader)) >= 1  # with new workers
    loader.close()


def test_long_lists_of_samples_and_long_answers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    count = 60_000
    np.save(tmp_path / "a.npy", np.arange(count)[:, None])
    data = Dataset(str(tmp_path), shuffle="none", transform=named)
    # The worker gets two lists of 30,000 numbers. Each list, and each answer, is longer than a pipe holds.
    loader = Loader(data, count, workers=Workers(1, processes=True, context="fork", ahead=2))
    assert [len(batch["name"]) for batch in loader] == [count]
    loader.close()


def named(record: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    del generator
    return {**record, "name": f"sample {record['array'][0]}, of which not much is known"}


def test_a_fork_makes_its_own_workers(tmp_path: Path) -> None:
    data = Dataset(rows(tmp_path, 64), shuffle="none")
    for workers in (Workers(1), Workers(1, processes=True, context="fork")):
        loader = Loader(data, 16, workers=workers)
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if not child:
            signal.alarm(120)
            found = [batch["array"][:, 0].tolist() for batch in batches]
            loader.close()
            os._exit(0 if found == [list(range(begin, begin + 16)) for begin in (16, 32, 48)] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(batches)) == 3
        loader.close()


TRAINING = """
import sys, time, tempfile, os
import numpy as np
from multiring.data import Dataset, Loader, Workers
def slow(record, generator):
    time.sleep(0.02 if record["array"] < 32 else 3600)
    return record
if __name__ == "__main__":
    path = tempfile.mkdtemp() + "/x.npy"
    np.save(path, np.arange(3000))
    data = Dataset(path, transform=slow, shuffle="none")
    loaders = [Loader(data, 16, workers=Workers(2, processes=True, context=sys.argv[1])) for _ in range(2)]
    for _ in zip(*loaders):
        if not os.fork():  # another child, which has inherited all ends of pipes
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(600)
            os._exit(0)
        workers = [each.process.pid for one in loaders for each in one._workers._workers]
        os.write(1, (" ".join(map(str, workers)) + "\\n").encode())
        time.sleep(600)
"""


LEFT_OPEN = """
import atexit, time
atexit.register(time.sleep, 1)  # runs after multiprocessing has ended the workers
import numpy as np
from multiring.data import Dataset, Loader, Workers
def slow(record, generator):
    time.sleep(0.05)
    return record
if __name__ == "__main__":
    np.save("x.npy", np.arange(3000))
    batches = iter(Loader(Dataset("x.npy", transform=slow), 16, workers=Workers(2, processes=True, context="fork")))
    print(len(next(batches)["array"]))
"""


def test_a_program_that_ends_replaces_no_worker(tmp_path: Path) -> None:
    (tmp_path / "left_open.py").write_text(LEFT_OPEN)
    words = [sys.executable, "left_open.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "16\n", "")


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_no_worker_outlives_its_training(tmp_path: Path, context: str) -> None:
    """The training may end in any way, at any moment, while another child holds the ends of the workers' pipes."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    with subprocess.Popen([sys.executable, script, context], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        (other,), workers = sorted((training.stdout.readline().split() for _ in range(2)), key=len)
        training.kill()
        training.wait()
        until = time.monotonic() + 240
        try:
            while left := [each for each in workers if Path(f"/proc/{each}").exists()]:
                assert time.monotonic() < until, f"workers {left} are still alive"
                time.sleep(0.05)
        finally:
            os.kill(int(other), signal.SIGKILL)


def test_all_ranks_measure_their_input_at_once(tmp_path: Path) -> None:
    """The first rank saves what one worker takes, and each rank tells its own rates."""
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "a.npy", np.zeros((640, 64), "float32"))
    bench = ["data", "bench", str(tmp_path / "d"), "--seconds", "0.2", "--workers", "2", "--save", "input.json"]
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, "-m", "multiring", *bench]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        for what in ("fed", "predicted", "a worker"):
            assert len(re.findall(rf"rank {rank}: {what} +[\d.]+ samples/s", ended.stdout)) == 1, ended.stdout
    found = measured_feeding_of((tmp_path / "input.json").read_text())
    assert found.workers == 2
    assert 0 < found.worker_s < 1
    assert 0 < found.batch_s < 10
    assert found.sample_bytes == pytest.approx(256, rel=0.01)
    few = [*command[:-2], "--batch", "1"]
    (tmp_path / "d" / "a.npy").unlink()
    np.save(tmp_path / "d" / "a.npy", np.zeros((1, 64), "float32"))
    ended = subprocess.run(few, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "1 sample for 2 ranks; want one for each" in ended.stderr

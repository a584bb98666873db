"""`multiring run --survive-launcher`: the ranks of a killed launcher go on, and a new launcher adopts them."""

import itertools
import os
import pty
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from multiring._launch.keeper_address import KeeperPlace, KeptJob, bound, meet, receive, send
from multiring._launch.kept_launcher import _adopted, _started
from multiring.errors import LaunchError

DEADLINE_S = 240.0  # a busy machine
PATIENCE = "60"
# It writes a line for each step to a file, and ends once it is told to, with the exit code that it is told.
PROGRAM = """
echo $$ >pid-$RANK.new; mv pid-$RANK.new pid-$RANK
step=0
while [ ! -e stop ]; do
    step=$((step + 1))
    echo $step 2 >>log-$RANK
    printf '%0*d step\\n' $1 $step
    sleep 0.02
done
echo END $RANK
exit $(cat stop)
"""
# The same with ranks that go on without each other.
ELASTIC = """
import os, sys, time
from pathlib import Path
import numpy as np
import multiring.adapters as ma
from multiring.adapters import elastic

ma.init()
born = ma.rank()
Path(f"pid-{born}.new").write_text(str(os.getpid()))
Path(f"pid-{born}.new").rename(f"pid-{born}")
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object, step=0, is_over=False
)


@elastic.run
def train(state):
    while not state.is_over:
        told = np.array([float(Path("stop").exists())])
        state.is_over = bool(np.asarray(ma.allreduce(told, op="max"))[0])
        time.sleep(0.02)
        state.step += 1
        state.commit()
        with open(f"log-{born}", "a") as file:
            file.write(f"{state.step} {ma.size()}\\n")


train(state)
print("END", ma.rank(), ma.size(), flush=True)
ma.shutdown()
"""


class Folder:
    """A folder in which launchers of one command run."""

    def __init__(self, path: Path) -> None:
        self.path, self.mark = path, secrets.token_hex(8)
        self._launchers: list[subprocess.Popen[str]] = []
        path.mkdir(exist_ok=True)
        (path / "train.sh").write_text(PROGRAM)
        (path / "train.py").write_text(ELASTIC)

    def launch(
        self,
        *words: str,
        patience: str = PATIENCE,
        program: Sequence[str] = ("sh", "train.sh", "3"),
        before: Sequence[str] = (),
        out: int = subprocess.PIPE,
        err: int = subprocess.PIPE,
    ) -> "subprocess.Popen[str]":
        """Start a launcher, by the command `before` if there is one; `out` and `err` are its standard outputs."""
        command = [*before, sys.executable, "-m", "multiring", "run", "--survive-launcher", patience, "-n", "2"]
        self._launchers.append(
            subprocess.Popen(
                [*command, *words, "--", *program],
                cwd=self.path,
                env={**os.environ, "TEST_MARK": self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        )
        return self._launchers[-1]

    def steps(self, rank: int = 0) -> list[tuple[int, int]]:
        """Return the steps that a rank has committed, each with the number of ranks."""
        log = self.path / f"log-{rank}"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(int(step), int(size)) for step, size in lines]

    def wait_for_steps(self, more: int = 5) -> None:
        """Wait until rank 0 has made so many more steps."""
        wanted = len(self.steps()) + more
        wait_until(lambda: len(self.steps()) >= wanted)

    def pids(self) -> list[int]:
        """Return the ranks' process IDs."""
        return [int((self.path / f"pid-{rank}").read_text()) for rank in range(2)]

    def stop(self, code: int = 0) -> None:
        """Let the ranks end."""
        (self.path / "stop.new").write_text(str(code))
        (self.path / "stop.new").rename(self.path / "stop")

    def left(self) -> dict[int, str]:
        """Return the living processes that the launchers have started, and their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and f"TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def keeper(self) -> int:
        """Return the process ID of the keeper, which leads a session and is no rank."""
        found = [pid for pid, words in self.left().items() if "run_kept" in words and os.getsid(pid) == pid]
        return min(found)

    def end(self) -> None:
        """End all that is left."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for launcher in self._launchers:
            launcher.kill()
            launcher.communicate(timeout=DEADLINE_S)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def killed(launcher: "subprocess.Popen[str]") -> None:
    launcher.kill()
    launcher.wait(DEADLINE_S)


def told(launcher: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=DEADLINE_S)
    return launcher.returncode, out, err


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "job")
    yield made
    made.end()


def test_the_same_command_adopts_the_ranks_of_a_killed_launcher(folder: Folder) -> None:
    words = ("--min-ranks", "1")
    first = folder.launch(*words, program=["train.py"])
    folder.wait_for_steps()
    pids = folder.pids()
    code, _, err = told(folder.launch(*words, program=["train.py"]))  # the launcher lives
    assert code == 2
    assert f"this job runs in this folder already, and process {first.pid} is its launcher" in err
    killed(first)
    os.kill(pids[1], signal.SIGKILL)  # a rank that is lost while there is no launcher
    wait_until(lambda: folder.steps()[-1][1] == 1)
    folder.wait_for_steps()
    second, third = (folder.launch(*words, program=["train.py"]) for _ in range(2))
    wait_until(lambda: (second.poll() is None) != (third.poll() is None))  # one of them is refused
    folder.stop()
    (code, out, err), (no, _, refused) = sorted([told(second), told(third)], key=lambda end: end[0])
    assert (code, no) == (0, 2), err
    assert "already" in refused or "cannot be adopted" in refused
    assert "this launcher has adopted the job" in err
    assert "[0] END 0 1" in out
    assert folder.pids()[0] == pids[0]
    assert f"the launcher (pid {first.pid}) was lost. The ranks go on for {PATIENCE} s" in told(first)[2]
    steps = [step for step, _ in folder.steps()]
    assert all(before < after for before, after in itertools.pairwise(steps))  # none twice
    wait_until(lambda: not folder.left())


def test_without_a_new_launcher_the_job_ends_in_time_and_says_so(folder: Folder) -> None:
    first = folder.launch(patience="2")
    folder.wait_for_steps()
    killed(first)
    wait_until(lambda: not folder.left())
    said = told(first)[2]
    assert "no new launcher came within 2 s: the job ends" in said
    assert "SIGTERM received" in said
    late = folder.launch(patience="2")  # a new job
    folder.stop()
    code, _, err = told(late)
    assert code == 0, err
    assert "the job survives its launcher" in err
    assert "adopted" not in err


def test_another_command_is_refused_while_a_job_waits(folder: Folder) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    killed(first)
    code, _, err = told(folder.launch("--grace", "5"))
    assert code == 2
    assert "a job of this folder has lost its launcher and waits for `multiring run --survive-launcher 60 -n 2" in err
    assert f"`kill {folder.keeper()}`" in err
    os.kill(folder.keeper(), signal.SIGTERM)
    wait_until(lambda: not folder.left())
    assert "which keeps the job, got SIGTERM" in told(first)[2]


def test_an_end_without_a_launcher_is_told_to_the_next_one(folder: Folder) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    killed(first)
    folder.stop(5)
    keeper = folder.keeper()
    wait_until(lambda: set(folder.left()) <= {keeper})
    other = folder.launch("--grace", "5")  # nothing waits that it could harm
    assert told(other)[0] == 5
    code, _, err = told(folder.launch())
    assert code == 5
    assert "this launcher has adopted the job, which has ended" in err
    wait_until(lambda: not folder.left())
    assert "the job has ended with exit code 5, without a launcher" in told(first)[2]


def test_a_launcher_that_is_killed_before_it_has_the_exit_code_leaves_it_to_the_next_one(folder: Folder) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    keeper = folder.keeper()
    first.send_signal(signal.SIGSTOP)  # the code is on its way
    folder.stop(5)
    wait_until(lambda: set(folder.left()) == {keeper, first.pid})
    time.sleep(1)
    assert keeper in folder.left()
    killed(first)
    code, _, err = told(folder.launch())
    assert code == 5
    assert "this launcher has adopted the job, which has ended" in err
    assert "the same command in this folder gets the code" in told(first)[2]
    wait_until(lambda: not folder.left())


def test_the_keeper_has_the_exit_code_until_the_launcher_has_ended(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that was killed after it had the code would be started again, and run the job anew.

    This process is the launcher here, so that it can be at any point of its end.
    """
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("TEST_MARK", folder.mark)
    words = ["run", "--survive-launcher", PATIENCE, "-n", "1", "--", "sh", "-c", "echo ran >>runs; exit 3"]
    place = KeeperPlace.of(words)
    listener = bound(place)
    assert listener is not None
    with listener:
        link, keeper = _started(listener, words, float(PATIENCE), "multiring._cli.run_kept")
    with link:
        link.settimeout(DEADLINE_S)
        assert receive(link)[0] == {"code": 3}
        send(link, taken=True)
        # The keeper has read that before it answers this guest, which comes later.
        with pytest.raises(LaunchError, match=f"process {os.getpid()} is its launcher"):
            _adopted(*found(place))
        assert keeper.poll() is None
    keeper.wait(DEADLINE_S)
    free = bound(place)
    assert free is not None
    free.close()
    assert (folder.path / "runs").read_text().split() == ["ran"]


def test_a_launcher_tells_that_it_has_the_exit_code_and_waits_for_nobody(folder: Folder) -> None:
    """The keeper here stays until it is told to end."""
    (folder.path / "keeping.py").write_text(
        "import json, socket, sys, time\nfrom pathlib import Path\n"
        "link = socket.socket(fileno=int(sys.argv[2]))\n"
        "link.send(json.dumps({'code': 7}).encode())\n"
        "told = [link.recv(1000), link.recv(1000)]\n"
        "Path('told.new').write_text(repr(told))\nPath('told.new').rename('told')\n"
        "while not Path('stop').exists():\n    time.sleep(0.02)\n"
    )
    program = "from multiring._launch.kept_launcher import run_kept; run_kept(['any'], 60.0, 'keeping')"
    environment = {**os.environ, "PYTHONPATH": f"{folder.path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=folder.path, env=environment, timeout=DEADLINE_S
    )
    assert done.returncode == 7
    wait_until((folder.path / "told").exists)
    assert (folder.path / "told").read_text() == """[b'{"taken": true}', b'']"""
    folder.stop()


def found(place: KeeperPlace) -> tuple[socket.socket, KeptJob]:
    """Meet the keeper at a place."""
    met = meet(place.address)
    assert met is not None
    return met


def test_a_signal_after_the_end_ends_a_launcher_whose_output_nobody_reads(folder: Folder) -> None:
    first = folder.launch(program=["sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x; echo; touch over-$RANK"])
    wait_until(lambda: all((folder.path / f"over-{rank}").exists() for rank in range(2)))
    wait_until(lambda: len(folder.left()) == 2)  # the launcher and the keeper
    first.send_signal(signal.SIGTERM)
    try:
        assert first.wait(10) == 0
    except subprocess.TimeoutExpired:  # the signal came before the keeper had seen the end: then the second counts
        first.send_signal(signal.SIGTERM)
        assert first.wait(DEADLINE_S) == 0
    wait_until(lambda: not folder.left())


def test_a_machine_that_ends_asks_all_processes_and_leaves_the_ranks_their_time(folder: Folder) -> None:
    program = """
import os, signal, sys, time
from pathlib import Path
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
Path(f"pid-{os.environ['RANK']}").touch()
while not asked:
    time.sleep(0.02)
time.sleep(3)
Path(f"saved-{os.environ['RANK']}").touch()
print("SAVED", flush=True)
"""
    first = folder.launch(program=[sys.executable, "-c", program])
    wait_until(lambda: all((folder.path / f"pid-{rank}").exists() for rank in range(2)))
    for pid in folder.left():
        os.kill(pid, signal.SIGTERM)
    code, out, err = told(first)
    assert code == 128 + signal.SIGTERM, err
    assert sorted(out.split()) == ["SAVED", "SAVED", "[0]", "[1]"], err
    wait_until(lambda: not folder.left())


def test_closed_outputs_take_nothing_from_a_job(folder: Folder) -> None:
    first = folder.launch(before=["sh", "-c", 'exec "$@" >&- 2>&-', "sh"])
    folder.wait_for_steps()
    killed(first)
    folder.wait_for_steps()
    second = folder.launch()
    assert second.stdout is not None
    assert "this launcher has adopted the job" in second.stdout.readline()  # the first had one file for both outputs
    folder.stop()
    code, out, _ = told(second)
    assert code == 0
    assert "[1] END 1" in out
    wait_until(lambda: not folder.left())


def launcher_at(address: str) -> int | None:
    """Return the process ID of the launcher of the job whose keeper is at an address."""
    met = meet(address)
    assert met is not None
    with met[0]:
        return met[1].launcher


def test_a_terminal_that_is_stopped_holds_up_neither_signals_nor_the_job_of_a_killed_launcher(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    program = ["sh", "train.sh", "3000"]  # a terminal is full after six lines
    first = folder.launch(program=program, out=theirs, err=theirs)
    folder.wait_for_steps()
    killed(first)
    folder.wait_for_steps(300)
    second = folder.launch(program=program, out=theirs, err=theirs)
    monkeypatch.chdir(folder.path)
    address = KeeperPlace.of(["run", "--survive-launcher", PATIENCE, "-n", "2", "--", *program]).address
    wait_until(lambda: launcher_at(address) == second.pid)
    second.send_signal(signal.SIGTERM)
    wait_until(lambda: not [words for words in folder.left().values() if words.startswith("sh train.sh")])
    assert second.poll() is None  # it waits for the terminal
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE_S) == 128 + signal.SIGTERM
    wait_until(lambda: not folder.left())
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("reads", [False, True], ids=["closed", "full"])
def test_output_that_nobody_reads_holds_nobody_up_and_the_last_of_it_is_kept(folder: Folder, *, reads: bool) -> None:
    program = ["sh", "train.sh", "50000"]  # a pipe is full after two lines
    first = folder.launch(program=program)
    assert first.stdout is not None
    assert first.stdout.readline()
    if reads:
        killed(first)
    else:  # with the whole pipeline, as by a shell
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()
        first.stdout = None
    folder.wait_for_steps(60)  # 3 MB of each rank
    second = folder.launch(program=program)
    folder.stop()
    code, out, err = told(second)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "END" in line) == ["[0] END 0", "[1] END 1"]
    assert "bytes of the output before this are lost" in out
    lines = [line for line in out.splitlines() if line.startswith("[0] 0")]
    assert lines
    assert {len(line) for line in lines} == {len("[0]  step") + 50_000}  # whole lines only


def test_a_full_disk_ends_the_output_and_not_the_job(folder: Folder) -> None:
    with Path("/dev/full").open("wb") as full:
        first = folder.launch(out=full.fileno())
    assert first.stderr is not None
    wait_until(lambda: "the output is cut off: No space left on device" in first.stderr.readline())  # type: ignore[union-attr]
    folder.wait_for_steps()
    killed(first)
    folder.wait_for_steps()
    second = folder.launch()  # writes elsewhere
    folder.stop()
    code, out, err = told(second)
    assert code == 0, err
    assert "bytes of the output before this are lost" in out
    assert sorted(line for line in out.splitlines() if "END" in line) == ["[0] END 0", "[1] END 1"]


def test_a_signal_to_the_launcher_ends_the_job(folder: Folder) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    killed(first)
    second = folder.launch()
    assert second.stderr is not None
    wait_until(lambda: "adopted" in second.stderr.readline())  # type: ignore[union-attr]
    second.send_signal(signal.SIGTERM)
    code, _, err = told(second)
    assert code == 128 + signal.SIGTERM, err
    assert "SIGTERM received" in err
    wait_until(lambda: not folder.left())


def test_a_killed_keeper_ends_the_job_and_the_launcher_says_so(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    monkeypatch.chdir(folder.path)
    address = KeeperPlace.of(["run", "--survive-launcher", PATIENCE, "-n", "2", "--", "sh", "train.sh", "3"]).address
    for nonsense in (b"{", b"[1]", b'{"adopt": 1}', b"\xff", b"[" * 9000):  # of a program that is no launcher
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(address)
            assert b'"keeper"' in stranger.recv(9999)
            stranger.send(nonsense)
            assert stranger.recv(9999) == b""
    folder.wait_for_steps()
    os.kill(folder.keeper(), signal.SIGKILL)
    code, _, err = told(first)
    assert code == 2
    assert "the process that keeps the job was killed, and the job with it" in err
    wait_until(lambda: not folder.left())


def test_without_readers_a_job_with_a_launcher_ends(folder: Folder) -> None:
    first = folder.launch()
    folder.wait_for_steps()
    assert first.stdout is not None
    first.stdout.close()
    first.stdout = None
    code, _, err = told(first)
    assert code == 128 + signal.SIGPIPE, err
    assert "nobody reads the output any more" in err


@pytest.mark.parametrize(
    ("words", "told_of"),
    [
        (["--survive-launcher", "0"], "--survive-launcher 0: want a number of seconds, 1 to 86400"),
        (["--survive-launcher", "nan"], "--survive-launcher nan: want a number of seconds, 1 to 86400"),
        (["--survive-launcher", "soon"], "argument --survive-launcher: 'soon': want a number of seconds, 1 to 86400"),
        (["--stdin", "0"], "--stdin needs the terminal of one launcher; leave out --survive-launcher"),
    ],
)
def test_wrong_words_are_refused(folder: Folder, words: list[str], told_of: str) -> None:
    code, _, err = told(folder.launch(*words))
    assert code == 2
    assert told_of in err
    assert not folder.left()


def test_a_folder_that_was_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LaunchError, match="this command's folder was removed"):
        KeeperPlace.of(["run"])

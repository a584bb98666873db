"""`multiring horovodrun` with the schedules of Horovod's elastic tests: hosts that come and go, and ranks that fail.

Horovod's schedules replace parts of its driver, so they are written anew here, with two hosts in place of two names of
one. docs/horovod.md says where the results differ on purpose.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ssh_hosts import HOME, SshHosts

pytestmark = pytest.mark.timeout(400)
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import horovod.torch as hvd

shared, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data, target = torch.randn(32, 2), torch.randint(0, 2, (32,))
log = shared / "log"


def fail(epoch):
    for rank in plan["fails"].get(str(epoch), []):
        if hvd.rank() == rank and not (shared / f"failed-{epoch}-{rank}").exists():
            (shared / f"failed-{epoch}-{rank}").touch()
            if plan["mode"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"fails in epoch {epoch}")


def step(state):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()
    state.batch += 1
    state.commit()
    time.sleep(0.1)


@hvd.elastic.run
def train(state):
    while state.epoch < plan["epochs"]:
        if hvd.rank() == 0 and str(state.epoch) in plan["hosts"]:
            (shared / "hosts.new").write_text(plan["hosts"][str(state.epoch)])
            (shared / "hosts.new").rename(shared / "hosts")
        wanted = plan["sizes"].get(str(state.epoch), hvd.size())
        while hvd.size() != wanted:  # until the hosts have come or gone
            step(state)
        state.batch = 0
        while state.batch < 5:
            if state.batch == 0:
                fail(state.epoch)
            step(state)
        if hvd.rank() == 0:
            told = [state.epoch, hvd.size(), os.environ["HOROVOD_HOSTNAME"], hvd.local_size()]
            with log.open("a") as file:
                file.write(json.dumps(told) + "\\n")
        state.epoch += 1
        state.batch = 0
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))
"""
_LONGEST_S = 300.0
TWO = "host0:2\nhost1:2\n"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all hosts see; each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def run(
    there: SshHosts, shared: Path, *words: str, first: str | None = None, mode: str = "exception", **plan: Any
) -> tuple[int, list[list[Any]], str]:
    """Run a schedule; return the exit code, rank 0's epochs, and what the launcher says.

    Args:
        there: the hosts.
        shared: a folder that they all see.
        words: options of horovodrun.
        first: what the discovery script prints first; None: `words` name the hosts.
        mode: how a rank fails.
        plan: "epochs", a number; and by epoch "hosts", "sizes" and "fails", the ranks that fail.
    """
    whole = {"epochs": 3, "hosts": {}, "sizes": {}, "fails": {}, "mode": mode, **plan}
    there.write("elastic.py", PROGRAM)
    if first is not None:
        (shared / "hosts").write_text(first)
        words = (*words, "--host-discovery-script", f"cat {shared}/hosts", "--max-np", "4")
    command = [*MULTIRING, "horovodrun", *words, "python", str(HOME / "elastic.py"), str(shared), json.dumps(whole)]
    process = there.start(0, command)
    try:
        _, err = process.communicate(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        pytest.fail(f"it hangs: {process.communicate(timeout=60)}")
    log = shared / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    for number in range(2):
        assert there.wait_until_gone(number) == []
    return process.returncode, [json.loads(line) for line in lines], err.decode()


MULTIRING = ("python", "-m", "multiring")


@pytest.mark.parametrize("slots", [1])
def test_hosts_are_added_and_removed(hosts: SshHosts, shared: Path, slots: int) -> None:
    steps = {"1": f"host0:{slots}\nhost1:{slots}\n", "2": f"host1:{slots}\n"}
    sizes = {"0": slots, "1": 2 * slots, "2": slots}
    code, epochs, err = run(
        hosts, shared, "-np", str(slots), "--min-np", str(slots), first=f"host0:{slots}\n", hosts=steps, sizes=sizes
    )
    assert (code, epochs) == (
        0,
        [[0, slots, "host0", slots], [1, 2 * slots, "host0", slots], [2, slots, "host1", slots]],
    ), err


def test_one_rank_fails(hosts: SshHosts, shared: Path) -> None:
    """Horovod goes on with the other host's two ranks. Here the host's healthy rank stays, and a newcomer comes."""
    code, epochs, err = run(
        hosts, shared, "-np", "2", "--min-np", "2", first=TWO, mode="kill", fails={"1": [0]}, sizes={"2": 4}
    )
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2], err
    assert [size for _, size, *_ in epochs] in ([4, 3, 4], [4, 4, 4]), err
    assert "rank 4 is started as a newcomer on host0" in err


def test_too_few_ranks_are_left(hosts: SshHosts, shared: Path) -> None:
    code, epochs, err = run(hosts, shared, "-np", "4", "--min-np", "4", first=TWO, fails={"1": [0]})
    assert code == 75, err
    assert [epoch for epoch, *_ in epochs] == [0]
    assert "fewer than --min-ranks 4" in err


def test_hosts_are_exchanged_beyond_the_limit_of_resets(hosts: SshHosts, shared: Path) -> None:
    """Horovod ends the job. Here it goes on, and nothing is started for the ranks that leave."""
    steps, sizes = {"1": TWO, "2": "host1:2\n"}, {"0": 2, "1": 4, "2": 2}
    code, epochs, err = run(
        hosts, shared, "-np", "2", "--min-np", "2", "--reset-limit", "1", first="host0:2\n", hosts=steps, sizes=sizes
    )
    assert (code, [size for _, size, *_ in epochs]) == (0, [2, 4, 2]), err
    assert "rank 3 is started as a newcomer on host1" in err
    assert "rank 4" not in err


def test_a_host_that_fails_twice_pauses(hosts: SshHosts, shared: Path) -> None:
    code, epochs, err = run(
        hosts, shared, "-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1", "2", first=TWO, epochs=5,
        fails={"1": [3], "3": [3]}, sizes={"2": 4, "3": 4, "4": 4},
    )  # fmt: skip
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2, 3, 4], err
    assert "host1 has failed twice: no newcomers are started there for 1 s" in err
    assert "rank 5 is started as a newcomer on host1" in err

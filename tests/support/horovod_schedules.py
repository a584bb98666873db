"""Schedules of Horovod's elastic tests for `multiring horovodrun`: hosts that come and go, and ranks that fail.

Horovod's schedules replace parts of its driver, so they are written anew here, with two hosts in place of two names of
one. docs/horovod.md says where the results differ on purpose. Each schedule is a function that raises AssertionError.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.ssh_hosts import HOME, SshHosts

_COMMON = """
import json, os, signal, sys, time
from pathlib import Path

shared, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
log = shared / "log"


def fail(epoch):
    for rank in plan["fails"].get(str(epoch), []):
        if hvd.rank() == rank and not (shared / f"failed-{epoch}-{rank}").exists():
            (shared / f"failed-{epoch}-{rank}").touch()
            if plan["mode"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"rank {rank} fails in epoch {epoch}")


def step(state):
    learn(state)
    state.batch += 1
    state.commit()
    time.sleep(0.1)


def schedule(state):
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
"""
_TORCH = """
import torch
import horovod.torch as hvd

torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data, target = torch.randn(32, 2), torch.randint(0, 2, (32,))


def learn(state):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()


hvd.elastic.run(schedule)(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))
"""
_TENSORFLOW = """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2)])
optimizer = tf.keras.optimizers.SGD(0.001 * hvd.size())
data, target = tf.random.uniform([32, 2]), tf.random.uniform([32], maxval=2, dtype=tf.int64)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)


def learn(state):
    with tf.GradientTape() as tape:
        value = loss(target, model(data, training=True))
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))


learn(None)  # makes the optimizer's variables
hvd.elastic.run(schedule)(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0))
"""
_KERAS = """
import numpy as np
import keras
import horovod.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001 * hvd.size()))
model.compile(optimizer, "sparse_categorical_crossentropy")
data, target = np.random.rand(32, 2).astype("float32"), np.random.randint(0, 2, 32)


def learn(state):
    model.train_on_batch(data, target)


hvd.elastic.run(schedule)(hvd.elastic.KerasState(model, epoch=0, batch=0))
"""
PROGRAMS = {"torch": _COMMON + _TORCH, "tensorflow": _COMMON + _TENSORFLOW, "keras": _COMMON + _KERAS}
_MULTIRING = ("python", "-m", "multiring")
_LONGEST_S = 300.0
_TWO = "host0:2\nhost1:2\n"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder that all hosts see; each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def run(
    there: SshHosts, framework: str, *words: str, first: str | None = None, mode: str = "exception", **plan: Any
) -> tuple[int, list[list[Any]], str]:
    """Run a schedule; return the exit code, rank 0's epochs, and what the launcher says.

    Args:
        there: the hosts.
        framework: the program's, of `PROGRAMS`.
        words: options of horovodrun.
        first: what the discovery script prints first; None: `words` name the hosts.
        mode: how a rank fails.
        plan: "epochs", a number; and by epoch "hosts", "sizes" and "fails", the ranks that fail.

    Raises:
        AssertionError: the job does not end, or leaves processes.
    """
    whole = {"epochs": 3, "hosts": {}, "sizes": {}, "fails": {}, "mode": mode, **plan}
    there.write("elastic.py", PROGRAMS[framework])
    with shared_folder() as shared:
        if first is not None:
            (shared / "hosts").write_text(first)
            words = (*words, "--host-discovery-script", f"cat {shared}/hosts", "--max-np", "4")
        command = [*_MULTIRING, "horovodrun", *words, "python", str(HOME / "elastic.py"), str(shared)]
        process = there.start(0, [*command, json.dumps(whole)], TF_CPP_MIN_LOG_LEVEL="2")
        try:
            _, err = process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise AssertionError(f"it hangs: {process.communicate(timeout=240)}") from None
        log = shared / "log"
        lines = log.read_text().splitlines() if log.exists() else []
    for number in range(2):
        assert there.wait_until_gone(number) == []
    return process.returncode, [json.loads(line) for line in lines], err.decode()


def hosts_are_added_and_removed(there: SshHosts, framework: str, slots: int = 1) -> None:
    """One host, then a second one, then the first one goes."""
    steps = {"1": f"host0:{slots}\nhost1:{slots}\n", "2": f"host1:{slots}\n"}
    sizes = {"0": slots, "1": 2 * slots, "2": slots}
    words = ("-np", str(slots), "--min-np", str(slots))
    code, epochs, err = run(there, framework, *words, first=f"host0:{slots}\n", hosts=steps, sizes=sizes)
    assert code == 0, err
    assert epochs == [[0, slots, "host0", slots], [1, 2 * slots, "host0", slots], [2, slots, "host1", slots]], err


def more_hosts_are_added_and_removed(there: SshHosts, framework: str) -> None:
    """The same with two ranks a host."""
    hosts_are_added_and_removed(there, framework, slots=2)


def _one_fails(there: SshHosts, framework: str, mode: str) -> None:
    """Horovod goes on with the other host's two ranks. Here the host's healthy rank stays, and a newcomer comes."""
    words = ("-np", "2", "--min-np", "2")
    code, epochs, err = run(there, framework, *words, first=_TWO, mode=mode, fails={"1": [0]}, sizes={"2": 4})
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2], err
    assert [size for _, size, *_ in epochs] in ([4, 3, 4], [4, 4, 4]), err
    assert "rank 4 is started as a newcomer on host0" in err


def one_rank_is_killed(there: SshHosts, framework: str) -> None:
    """Rank 0 is killed in epoch 1."""
    _one_fails(there, framework, "kill")


def one_rank_raises_an_error(there: SshHosts, framework: str) -> None:
    """Rank 0 raises an error in epoch 1."""
    _one_fails(there, framework, "exception")


def one_rank_of_named_hosts_is_killed(there: SshHosts, framework: str) -> None:
    """The hosts are not to be scaled. A newcomer has the lost rank's place."""
    words = ("-np", "4", "-H", "host0:2,host1:2", "--min-np", "2")
    code, epochs, err = run(there, framework, *words, mode="kill", fails={"1": [0]})
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2], err
    assert all(size in (3, 4) for _, size, *_ in epochs), err


def all_ranks_fail(there: SshHosts, framework: str) -> None:
    """The job fails, as with Horovod."""
    words = ("-np", "2", "--min-np", "2")
    code, epochs, err = run(there, framework, *words, first=_TWO, mode="kill", fails={"1": [0, 1, 2, 3]})
    assert code != 0, err
    assert [epoch for epoch, *_ in epochs] == [0], err


def a_rank_of_each_host_fails(there: SshHosts, framework: str) -> None:
    """With Horovod, all hosts are blacklisted, and the job fails. Here the healthy ranks go on."""
    words = ("-np", "2", "--min-np", "2")
    code, epochs, err = run(there, framework, *words, first=_TWO, mode="kill", fails={"1": [0, 2]}, sizes={"2": 4})
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2], err


def too_few_ranks_are_left(there: SshHosts, framework: str) -> None:
    """Horovod waits for hosts first. Here the ranks may save their state, and the job ends."""
    words = ("-np", "4", "--min-np", "4")
    code, epochs, err = run(there, framework, *words, first=_TWO, fails={"1": [0]})
    assert code == 75, err
    assert [epoch for epoch, *_ in epochs] == [0]
    assert "fewer than --min-ranks 4" in err


def hosts_are_exchanged_beyond_the_limit_of_resets(there: SshHosts, framework: str) -> None:
    """Horovod ends the job. Here it goes on, and nothing is started for the ranks that leave."""
    steps, sizes = {"1": _TWO, "2": "host1:2\n"}, {"0": 2, "1": 4, "2": 2}
    words = ("-np", "2", "--min-np", "2", "--reset-limit", "1")
    code, epochs, err = run(there, framework, *words, first="host0:2\n", hosts=steps, sizes=sizes)
    assert (code, [size for _, size, *_ in epochs]) == (0, [2, 4, 2]), err
    assert "rank 3 is started as a newcomer on host1" in err
    assert "rank 4" not in err, err


def a_host_that_fails_twice_pauses(there: SshHosts, framework: str) -> None:
    """It gets no newcomers for a time that an option sets."""
    words = ("-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1", "2")
    fails, sizes = {"1": [3], "3": [3]}, {"2": 4, "3": 4, "4": 4}
    code, epochs, err = run(there, framework, *words, first=_TWO, epochs=5, fails=fails, sizes=sizes)
    assert code == 0, err
    assert [epoch for epoch, *_ in epochs] == [0, 1, 2, 3, 4], err
    assert "host1 has failed twice: no newcomers are started there for 1 s" in err
    assert "rank 5 is started as a newcomer on host1" in err


SCHEDULES: dict[str, Callable[[SshHosts, str], None]] = {
    each.__name__: each
    for each in (
        hosts_are_added_and_removed,
        more_hosts_are_added_and_removed,
        one_rank_is_killed,
        one_rank_raises_an_error,
        one_rank_of_named_hosts_is_killed,
        all_ranks_fail,
        a_rank_of_each_host_fails,
        too_few_ranks_are_left,
        hosts_are_exchanged_beyond_the_limit_of_resets,
        a_host_that_fails_twice_pauses,
    )
}

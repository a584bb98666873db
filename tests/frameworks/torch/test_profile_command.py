"""multiring profile: scripts that train with torch, profiled without a change, and scripts that cannot be profiled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from multiring._cli import main
from multiring._simulator.script_profile import ScriptProfile, script_profile_of
from multiring.errors import StateError
from multiring.torch.profiling.recorder import LEAST, WARM_UP, StepRecorder

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(240, 16), torch.randint(0, 4, (240,))), batch_size=8)
"""
LOOP = """
for points, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
open("ended", "w").close()
"""
LONG = MODEL + LOOP.replace("in loader", "in list(loader) * 100000")  # more steps than any profile takes
OURS = (
    MODEL + "import multiring.torch as mt\nmodel, optimizer, loader = mt.distribute(model, optimizer, loader)\n" + LOOP
)
DDP = (
    MODEL.replace(
        "optimizer =",
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)\noptimizer =",
    )
    + LOOP
)
# Each sample takes 41 ms of a worker, of which 1 ms is processor time; a batch of 8 by 2 workers takes 164 ms.
FED = (
    MODEL
    + """
import os, time, numpy as np, multiring.torch as mt
from multiring.data import Dataset

def slow(record, generator):
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    time.sleep(0.04)
    return record

os.makedirs("data", exist_ok=True)
np.save("data/a.npy", np.zeros((240, 16), "float32"))
batches = mt.DataLoader(Dataset("data", transform=slow), 8, workers=2)
for batch in batches:
    points = batch["array"]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), torch.zeros(8, dtype=torch.int64)).backward()
    optimizer.step()
"""
)
# The same by torch's loader and two worker processes.
FORKED = (
    FED.replace("mt.DataLoader(Dataset", "DataLoader(Slow(Dataset")
    .replace("transform=slow), 8, workers=2)", "transform=slow)), batch_size=8, num_workers=2)")
    .replace(
        "os.makedirs",
        """
class Slow(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, number):
        return self.data[number]

os.makedirs""",
    )
)
ACCUMULATED = MODEL + (
    "for number, (points, labels) in enumerate(loader):\n"
    "    nn.functional.cross_entropy(model(points), labels).backward()\n"
    "    if number % 3 == 2:\n"
    "        optimizer.step()\n"
)


def profiled(folder: Path, script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "multiring", "profile", "--steps", "4", *words, "--", sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def profile_of(folder: Path, script: str, *words: str) -> ScriptProfile:
    ended = profiled(folder, script, *words)
    assert ended.returncode == 0, ended.stderr
    return script_profile_of((folder / "profile.json").read_text())


@pytest.mark.parametrize(
    ("script", "form", "bucket_mib"),
    [
        (MODEL + LOOP, "plain torch", 25),
        (OURS, "mt.distribute", 25),
        ("import multiring.torch\n" + OURS, "mt.distribute", 25),
        (DDP, "DistributedDataParallel", 1),
    ],
)
def test_a_script_is_profiled(script: str, form: str, bucket_mib: int, tmp_path: Path) -> None:
    found = profile_of(tmp_path, script)
    assert (found.form, found.model, found.precision) == (form, "Sequential", "float32")
    assert (found.samples, found.steps, found.bucket_bytes) == (8, 4, bucket_mib << 20)
    sizes = {"0.weight": 4096, "0.bias": 256, "2.weight": 1024, "2.bias": 16}
    assert {each.name: each.bytes for each in found.gradients} == sizes
    # Backward reaches the last layer first.
    assert {each.name for each in found.gradients[:2]} == {"2.weight", "2.bias"}
    assert 0 < found.gradients[0].ready_s <= found.gradients[-1].ready_s < 2 * found.seconds.backward
    parts = found.seconds
    assert parts.input > 0
    assert parts.step == pytest.approx(parts.input + parts.forward + parts.backward + parts.optimizer + parts.other)
    assert len(found.compute_s) == found.steps
    assert min(found.compute_s) < parts.forward + parts.backward + 1e-6 < 3 * max(found.compute_s)
    assert found.peak_memory_bytes > 50 << 20
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize("script", [FED, FORKED])
def test_what_workers_take_for_a_sample_is_measured(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = profiled(tmp_path, script)
    assert ended.returncode == 0, ended.stderr
    assert "input: 2 workers, " in ended.stdout
    file = tmp_path / "profile.json"
    found = script_profile_of(file.read_text())
    assert found.feeding is not None
    assert found.feeding.workers == 2
    assert 0.0009 < found.feeding.cpu_s <= found.feeding.worker_s
    assert found.feeding.worker_s > 0.039  # the sleep: a virtual machine's clock of processor time may run ahead
    # The training waits for its samples, and that wait is no other work of the script.
    computes_s = found.seconds.step - found.seconds.input
    assert found.seconds.input >= 0.25 * (8 * 0.041 / 2 - computes_s)
    assert (
        main(["simulate", "--topology", "ddl", "--profile", str(file), "--ranks", "2", "--workers", "1", "--json"]) == 0
    )
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["step_s"] >= step["input"]["seconds"] > 7.99 * found.feeding.worker_s


def test_samples_of_other_loaders_are_not_priced(tmp_path: Path) -> None:
    """The training's own thread is no worker, and a loader for something else makes none of the model's samples."""
    assert profile_of(tmp_path, MODEL + LOOP).feeding is None
    beside = FED.replace("for batch in batches", "other = next(iter(batches))\nfor points, labels in loader")
    beside = beside.replace('points = batch["array"]', "pass")
    assert profile_of(tmp_path, beside).feeding is None


@pytest.mark.parametrize("script", [OURS, DDP.replace("'gloo'", "'multiring'")])
def test_a_prediction_is_graded_by_a_run_of_the_script(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script.replace("import torch\n", "import torch, multiring.torch\n", 1)
    profile_of(tmp_path, script)
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--timeline", "run.json", "--", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    profile, run = str(tmp_path / "profile.json"), str(tmp_path / "run.json")
    assert main(["simulate", "--profile", profile, "--against", run, "--json"]) == 0
    parts = {each["part"]: each for each in json.loads(capsys.readouterr().out)["parts"]}
    assert [name for name, each in parts.items() if each["source"] == "input"] == ["ranks", "hosts"]
    assert (parts["ranks"]["measured"], parts["ranks"]["error"]) == (2, None)
    assert parts["number of buckets"]["error"] == 0
    assert parts["bucket 1, bytes"]["error"] < 0.05
    for name in ("step", "compute", "update", "communication", "bucket 1"):
        assert parts[name]["measured"] > 0


def test_a_script_may_go_on_to_its_end(tmp_path: Path) -> None:
    assert profile_of(tmp_path, MODEL + LOOP, "--to-end", "--ranks-per-host", "2").steps == 4
    assert (tmp_path / "ended").exists()


def test_copies_run_beside_the_script(tmp_path: Path) -> None:
    ended = profiled(tmp_path, LONG, "--ranks-per-host", "2")
    assert ended.returncode == 0, ended.stderr
    found = script_profile_of((tmp_path / "profile.json").read_text())
    assert (found.copies, found.steps) == (2, 4)
    assert "beside 1 more of the script" in ended.stdout
    assert "copies of the script ended" not in ended.stdout


def test_copies_that_fail_are_counted(tmp_path: Path) -> None:
    is_copy = "any('copy-' in each and os.path.isdir(each) for each in sys.orig_argv)"  # the folder of the process
    failing = f"import os, sys\nif {is_copy}:\n    sys.exit(3)\n" + LONG
    ended = profiled(tmp_path, failing, "--ranks-per-host", "3")
    assert ended.returncode == 0, ended.stderr
    assert script_profile_of((tmp_path / "profile.json").read_text()).copies == 1
    assert "2 of 2 copies of the script ended before it was measured, so the times are those of 1" in ended.stdout


def test_a_profiled_rank_reduces_its_gradients_alone(tmp_path: Path) -> None:
    said = "import json\nopen('said', 'a').write(json.dumps(optimizer._reducer is not None) + '\\n')\n"
    script = OURS.replace(LOOP, said + LOOP)
    profile_of(tmp_path, script)
    command = [sys.executable, "-m", "multiring", "run", "-n", "1", "--", "train.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600, check=True)
    assert (tmp_path / "said").read_text().splitlines() == ["true", "false"]


# Trains with each way to share gradients in a job of one rank, which exchanges with itself, and without sharing.
ALONE = """
import copy, torch
from torch import nn
import multiring.torch as mt
from multiring.torch.alone import LONE_RANK
LONE_RANK.exchanges = True
mt.init()
for sparse, options in (
    (False, {}), (False, {"op": mt.Sum}), (False, {"op": mt.Adasum}), (True, {}), (True, {"sparse_as_dense": True}),
    (False, {"compression": mt.Compression.fp16, "groups": 1}), (False, {"gradient_predivide_factor": 2.0}),
):
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Embedding(20, 8, sparse=sparse), nn.Flatten(), nn.Linear(32, 4))
    plain = copy.deepcopy(ours)
    shared = torch.optim.SGD(ours.parameters(), lr=0.1)
    shared = mt.DistributedOptimizer(shared, named_parameters=ours.named_parameters(), **options)
    assert shared._reducer is not None or shared._delta_reducer is not None
    pairs = (ours, shared), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(4):
        points, labels = torch.randint(0, 20, (6, 4)), torch.randint(0, 4, (6,))
        for model, optimizer in pairs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, msg=lambda text: f"{options}, sparse={sparse}: {text}")
"""


def test_a_rank_that_exchanges_with_itself_trains_as_without() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    found = profile_of(tmp_path, ACCUMULATED)
    assert (found.samples, found.backwards) == (24, 3)
    assert found.seconds.forward > found.seconds.backward / 2  # two of the three backwards are in it


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (MODEL + "print(model(torch.ones(1, 16)))", "the script made no step of an optimizer: want plain torch"),
        (MODEL + LOOP.replace("in loader", "in list(loader)[:5]"), "the program made 5 optimizer steps"),
        (
            MODEL + "model = nn.DataParallel(model)\n" + LOOP,
            "the model is a DataParallel, which multiring cannot profile",
        ),
        (
            MODEL + LOOP.replace("optimizer.step()", "optimizer.step(lambda: model(points).sum().backward())"),
            "the optimizer computes gradients in its step",
        ),
        (
            MODEL
            + "both = optimizer, torch.optim.SGD(model.parameters(), lr=0.1)\nturn = 0\n"
            + LOOP.replace("optimizer.step()", "both[turn].step(); turn = 1 - turn"),
            "steps alternate between optimizers",
        ),
        ("import os; os._exit(0)", "ended its process (os._exit) before a profile could be written"),
    ],
)
def test_other_scripts_are_refused(script: str, reason: str, tmp_path: Path) -> None:
    ended = profiled(tmp_path, script)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "profile.json").exists()


def test_a_failing_script_keeps_its_error(tmp_path: Path) -> None:
    ended = profiled(tmp_path, MODEL + "raise ValueError('no data')")
    assert ended.returncode == 1
    assert "ValueError: no data" in ended.stderr
    assert "no step" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "no script: want multiring profile -- python train.py"),
        (["--", "python", "-c", "pass"], "want a file, or -m with a module"),
        (["--", "train.sh"], "train.sh: no such file; want a Python script"),
        (["--steps", "1", "--", "x.py"], "--steps 1: want a whole number, 3 to"),
        (["--ranks-per-host", "60000", "--", __file__], "--ranks-per-host 60000: each is a copy of the script"),
        (["-o", "/", "--", __file__], "'/' is a folder, and no place for a profile: want the name of a file"),
        (["-o", "/nowhere/p.json", "--", __file__], "there is no directory /nowhere; make it first"),
    ],
)
def test_wrong_commands_are_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert reason in capsys.readouterr().err


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("precious")
    ended = profiled(tmp_path, MODEL + LOOP)
    assert ended.returncode == 2
    assert (tmp_path / "profile.json").read_text() == "precious"
    assert not (tmp_path / "ended").exists()


def steps(recorder: StepRecorder, count: int, *, at: int = 0, optimizers: int = 1) -> None:
    """Make steps of 100 ns: 10 input, 5 other, 20 forward, 40 backward, 25 update; gradients after 15 and 30."""
    for step in range(count):
        begin = at + 100 * step
        recorder.waited(10)
        recorder.forward(begin + 15)
        recorder.computed(4)
        recorder.backward_begins(begin + 35)
        recorder.is_ready("b", begin + 50)
        recorder.is_ready("a", begin + 65)
        recorder.backward_ends(begin + 75)
        for number in range(optimizers):
            recorder.update_begins(begin + 75 + number)
            recorder.update_ends(begin + 100, number)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_parts_of_a_step_add_up(optimizers: int) -> None:
    completed: list[int] = []
    met: list[int] = []
    recorder = StepRecorder(LEAST, 0, lambda: completed.append(1), lambda: met.append(1))
    steps(recorder, WARM_UP - 1, optimizers=optimizers)
    assert not met
    steps(recorder, 1 + LEAST, at=100 * (WARM_UP - 1), optimizers=optimizers)
    assert met == [1]  # in the last step to warm up
    assert not completed  # a step ends when the next begins: another optimizer may belong to it
    recorder.forward(100 * (WARM_UP + LEAST) + 15)
    assert completed
    found = recorder.measured()
    assert (found.steps, found.samples, found.backwards) == (LEAST, 4, 1)
    seconds = found.seconds
    # Two optimizers' updates overlap here only because this test says so: 25 + 24 ns.
    assert seconds.optimizer == pytest.approx([25e-9, 49e-9][optimizers - 1])
    assert (seconds.input, seconds.forward, seconds.backward) == pytest.approx((10e-9, 20e-9, 40e-9))
    assert [key for key, _ in found.ready] == ["b", "a"]
    assert [at for _, at in found.ready] == pytest.approx([15e-9, 30e-9])
    if optimizers == 1:
        assert seconds.other == pytest.approx(5e-9)
        assert seconds.step == pytest.approx(100e-9)


def test_steps_that_differ_are_not_counted() -> None:
    """An epoch's last batch is smaller, and a loss scaler leaves out an update."""
    recorder = StepRecorder(9, 0, lambda: None)
    steps(recorder, WARM_UP + 4)
    at = 100 * (WARM_UP + 4)
    recorder.forward(at)
    recorder.computed(1)
    recorder.backward_begins(at + 1)
    recorder.backward_ends(at + 2)
    recorder.update_begins(at + 3)
    recorder.update_ends(at + 4, 0)
    steps(recorder, 1, at=at + 4)
    found = recorder.measured()
    assert (found.steps, found.samples) == (5, 4)
    few = StepRecorder(9, 0, lambda: None)
    steps(few, WARM_UP + LEAST - 1)
    with pytest.raises(StateError, match="want at least 6, 3 of them to warm up"):
        few.measured()

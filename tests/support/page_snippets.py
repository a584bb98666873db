"""Python blocks of the pages that need a program around them, and that program."""

import os
import sys
from dataclasses import dataclass
from types import ModuleType

from tests.support.ranks import Here

TRAINING = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import multiring
import multiring.torch as mt

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(32, 4), torch.randint(0, 3, (32,))
dataset = TensorDataset(images, labels)
loader = DataLoader(dataset, batch_size=8)
"""
JOINED = TRAINING + "mt.init()\n"
SHARED = JOINED + "optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())\n"
# torchrun gives torch the addresses; a file replaces them here.
MEETING = (
    'init_process_group("multiring")',
    'init_process_group("multiring", init_method=f"file://{STORE}", rank=RANK, world_size=2)',
)
MEETS = """
import os
STORE, RANK = os.path.abspath("store"), int(os.environ["MULTIRING_RANK"])
"""
FITTING = """
import numpy as np
images, labels = np.random.default_rng(0).normal(size=(32, 4)), np.zeros((32, 1))
own_images, own_labels = images[:16], labels[:16]
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """How a block of Python is run, on two ranks, in its own module."""

    before: str = ""  # the program around the block
    after: str = ""  # checks the block's promise
    instead: tuple[str, str] = ("", "")  # what does not exist here or takes long, and its replacement
    framework: str = "torch"


STUDY = """
import multiring
from multiring import trials
multiring.init()
objective = lambda trial: trial.params["rate"]
"""

# The snippets by page and title.
SNIPPETS = {
    (
        "index.md",
        "model, optimizer, loader = mt.distribute(model, optimizer, loader)  # the rest of the script stays",
    ): (Snippet(before=TRAINING, after="assert len(next(iter(loader))[1]) == 4")),
    ("distribute.md", "model, optimizer, loader = mt.distribute(model, optimizer, loader)"): Snippet(
        before=TRAINING, after="assert loader.global_batch_size == 8"
    ),
    ("distribute.md", 'model, optimizer, loader = mt.distribute(model, optimizer, loader, shares="speed")'): Snippet(
        before=TRAINING, after="assert len(next(iter(loader))[1]) == 4"
    ),
    ("distribute.md", "@mt.elastic.run"): Snippet(
        before=TRAINING
        + """
epochs, seen = 2, []
def step(images, labels):
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
    seen.append(len(labels))
""",
        after="assert seen == [4] * 8 and loader.epoch == 2",
    ),
    ("convergence.md", "model, optimizer, loader = mt.distribute(model, optimizer, loader)"): Snippet(
        before=TRAINING
        + """
loss_of, inputs, labels = cross_entropy, images[:8], labels[:8]
peak_of_small_products = lambda: mt.measured_peak(sizes=(32, 64), channels=8, seconds=0.001)
""",
        after="assert report is not None",
        # The default sizes take a minute of two busy cores.
        instead=("samples=len(inputs))", "samples=len(inputs), measure=peak_of_small_products)"),
    ),
    ("convergence.md", "narrow, model = Net(width=64), Net(width=256)"): Snippet(
        before="""
import torch
from torch import nn

import multiring.torch as mt

class Net(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(9, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

best_rate_of_width_64 = 8e-3
""",
        after="assert sorted(group['lr'] for group in optimizer.param_groups) == [2e-3, 8e-3, 8e-3]",
    ),
    ("adapters.md", "ADAPTER = conformance.Adapter("): Snippet(after="assert ADAPTER.name == 'mine'"),
    ("adapters.md", "class Trainer:"): Snippet(
        after="""
adapters.init()
slope = np.full(2, 1.0 + adapters.rank(), np.float32)
trainer = ADAPTER.trainer({"used": np.zeros(2, np.float32), "unused": slope}, 0.5, adapters.global_process_set)
state = trainer.state(step=adapters.rank())
state.sync()
trainer.step({"used": slope})
assert trainer.parameters()["used"].tolist() == [-0.75, -0.75]
assert trainer.parameters()["unused"].tolist() == [1.0, 1.0]
assert state.step == 0
state.restore()
assert trainer.parameters()["used"].tolist() == [0.0, 0.0]
assert ADAPTER.all_reduce(slope, "max", process_set=adapters.global_process_set).tolist() == [2.0, 2.0]
""",
        framework="",
    ),
    ("data.md", 'data = Dataset("/data/imagenet/train", seed=1)  # or s3://bucket/train, https://..., a pack'): Snippet(
        before="""
import os
from pathlib import Path
from PIL import Image
for number in range(4):
    place = Path(f"images{os.environ['MULTIRING_RANK']}/class{number % 2}")
    place.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (number, 0, 0)).save(place / f"{number}.png")
""",
        instead=('"/data/imagenet/train"', "str(place.parent)"),
        after="assert batch['image'].shape == (4, 8, 8, 3) and sorted(batch['label']) == [0, 0, 1, 1]",
    ),
    ("data.md", 'state = loader.state_dict()  # {"epoch": 0, "samples": 8192, "seed": 1, ...}'): Snippet(
        before="""
import numpy as np
from multiring.data import Dataset, Loader
import os
own = f"samples{os.environ['MULTIRING_RANK']}.npy"
np.save(own, np.arange(64.0).reshape(32, 2))
data = Dataset(own, seed=1)
loader = Loader(data, 4)
next(iter(loader))
""",
        after="assert later.state_dict() == state and state['seed'] == 1",
    ),
    ("ddp.md", 'dist.init_process_group("multiring")'): Snippet(
        before=TRAINING + MEETS,
        instead=MEETING,
        after="cross_entropy(model(images), labels).backward()\nassert dist.get_world_size() == 2",
    ),
    ("torch.md", 'torch.distributed.init_process_group("multiring")'): Snippet(
        before="import torch.distributed" + MEETS,
        instead=MEETING,
        after="torch.distributed.all_reduce(x := torch.ones(2))\nassert x.tolist() == [2, 2]",
    ),
    ("parallelize.md", 'dist.init_process_group("multiring")  # or any other backend for tensors on CPUs'): Snippet(
        before=TRAINING + MEETS + "inputs = images[:8]\n", instead=MEETING, after="assert loss.isfinite()"
    ),
    ("elastic.md", "@mt.elastic.run"): Snippet(
        before=TRAINING.replace("loader = DataLoader(dataset, batch_size=8)", "epochs = 2")
        + """
mt.init()
loader = DataLoader(dataset, batch_size=4, sampler=mt.elastic.ElasticSampler(dataset))
""",
        after="assert mt.size() == 2",
    ),
    ("elastic.md", "state = mt.elastic.TorchState(model, optimizer, shares=mt.elastic.SpeedShares(), step=0)"): Snippet(
        before=TRAINING
        + """
mt.init()
optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
batch = list(range(5))
def loss_of(model, mine):
    images, labels = next(iter(DataLoader(torch.utils.data.Subset(dataset, mine), batch_size=len(mine))))
    return torch.nn.functional.cross_entropy(model(images), labels)
""",
        after="state.commit()\nassert len(state.shares.part(5)) in (1, 2, 3, 4)",
    ),
    ("elastic.md", "def part(rank, ranks):"): Snippet(
        before=TRAINING + "mt.init()\ncount = 5\n",
        after="""
assert state.moments.numel() == (2, 3)[mt.rank()]
change = mt.elastic.RankChange(rank=0, former=(1,), former_size=2)
assert divide({0: torch.ones(2), 1: torch.zeros(3)}, change).tolist() == [1, 1, 0, 0, 0]
""",
    ),
    ("horovod.md", "import multiring.torch as hvd"): Snippet(after="hvd.init()\nassert hvd.size() == 2"),
    ("loop.md", "accumulated = mt.accumulate(optimizer, 4)"): Snippet(before=SHARED, after="assert completes"),
    ("loop.md", 'log = mt.metrics_hook(lambda: wandb.init(project="digits").log, every=10)  # W&B'): Snippet(
        before=JOINED
        + """
from types import SimpleNamespace
told = []
class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, name, value, step): told.append((name, value, step))
wandb = SimpleNamespace(init=lambda project: SimpleNamespace(log=lambda metrics, step: None))
loss = 2.0
""",
        after="assert told == ([] if mt.rank() else [('loss', 2.0, 3)])",
    ),
    ("loop.md", 'scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)  # bfloat16 needs none'): Snippet(
        before=SHARED + "dtype = torch.float16\n", after="assert scaler.get_scale() > 0"
    ),
    ("training.md", "@dataclass(frozen=True, kw_only=True)"): Snippet(
        before="from dataclasses import dataclass\nfrom multiring.training import TrainingOptions, parse_options\n",
        after="assert (options.hidden, options.rate, options.epochs) == (64, 0.05, 5)",
    ),
    ("run.md", "asked = []"): Snippet(
        before="""
import signal
import numpy as np
import multiring
group, steps, done = multiring.init(), 100, []
train = lambda step: (done.append(step), step == 3 and group.rank == 1 and signal.raise_signal(signal.SIGTERM))
save = lambda: done.append("saved")
""",
        after="assert done == [0, 1, 2, 3, 'saved']",
        framework="",
    ),
    ("live.md", "multiring.log_metrics(step=step, loss=loss)"): Snippet(
        before="import multiring\nfrom multiring._steps.step_counters import STEPS\nstep, loss = 3, 0.5\n",
        after="assert STEPS.step == 3",
        framework="",
    ),
    ("live.md", 'for line in open("run.jsonl"):'): Snippet(
        before="import json, os, tempfile\nfrom pathlib import Path\nos.chdir(tempfile.mkdtemp())\n"
        "from multiring._launch.live_record import LiveRecord\n"
        "from multiring._steps.step_report import StepReport\nrecord = LiveRecord(Path('run.jsonl'), print)\n"
        "record.begin('job', 'train.py')\nrecord.add_steps(0, StepReport(steps=4, metrics={'loss': 0.5}))\n"
        "record.end(0)\nopen('run.jsonl', 'a').write('{\"kind\":')\n",
        after="assert told['kind'] == 'over'",
        framework="",
    ),
    ("trials.md", 'space = {"rate": {"low": 1e-5, "high": 0.1, "log": True}, "ranks": [1, 2, 4]}'): Snippet(
        before=STUDY,
        instead=("[1, 2, 4]", "[1, 2]"),
        after="assert {len(each.ranks) for each in study.trials} == {1, 2}",
        framework="",
    ),
    ("trials.md", "for epoch in range(epochs):"): Snippet(
        before=STUDY + "reported = []\nclass trial:\n    report = lambda loss, step: reported.append((step, loss))\n"
        "    should_prune = lambda: False\nepochs, train_epoch = 3, lambda: 0.5\n",
        after="assert reported == [(0, 0.5), (1, 0.5), (2, 0.5)]",
        framework="",
    ),
    ("trials.md", 'study = trials.run(objective, space, trials=64, storage="study.db", name="digits")'): Snippet(
        before=STUDY + "import os, tempfile\nos.chdir(tempfile.mkdtemp())\nspace = {'rate': [0.1, 0.2]}\n",
        instead=("study.db", "study.log"),
        after="assert study.unsaved == 0 and len(study.trials) == 64",
        framework="",
    ),
    ("trials_population.md", 'if member.exchange(loss, {"model": model, "optimizer": optimizer}):'): Snippet(
        before=JOINED
        + "loss = 0.5\nclass member:\n    params = {'rate': 0.25}\n    exchange = lambda loss, state: True\n",
        after="assert optimizer.param_groups[0]['lr'] == 0.25",
    ),
    ("timeline.md", 'multiring.start_timeline("trace.json")  # some steps of it: every rank calls both'): Snippet(
        before="import multiring\ngroup = multiring.init()\nstep = group.barrier\n",
        after="import json\nassert len(json.load(open('trace.json'))['traceEvents']) > 20",
        framework="",
    ),
    (
        "torch_optimizer.md",
        "gradients = mt.shared_zeros_like(list(model.parameters()))  # adjacent, in memory that the host's ranks share",
    ): Snippet(
        before=JOINED,
        after="[each.fill_(mt.rank()) for each in gradients]\nmt.grouped_allreduce_(gradients)\n"
        "assert all((each == 0.5).all() for each in gradients)",
    ),
    ("torch_optimizer.md", "model[0].requires_grad_(False)  # first the head alone learns"): Snippet(
        before=JOINED + "first = model[0].weight.detach().clone()\n"
        "def train(model, optimizer):\n"
        "    for batch in range(2):\n"
        "        optimizer.zero_grad()\n"
        "        rows = slice(8 * batch + 4 * mt.rank(), 8 * batch + 4 * mt.rank() + 4)\n"
        "        cross_entropy(model(images[rows]), labels[rows]).backward()\n"
        "        optimizer.step()\n"
        "    assert torch.equal(model[0].weight, first) != model[0].weight.requires_grad\n",
        after="sums = mt.allgather(torch.stack([each.detach().sum() for each in model.parameters()])[None])\n"
        "assert torch.equal(sums[0], sums[1])",
    ),
    ("torch_optimizer.md", "og = mt.DistributedOptimizer(og, G.named_parameters())"): Snippet(
        before=JOINED + "G, D = nn.Linear(3, 4), nn.Linear(4, 1)\n"
        "og, od = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (G, D))\n"
        "true, noise, one, zero = torch.randn(8, 4), torch.randn(8, 3), torch.ones(8, 1), torch.zeros(8, 1)\n"
        "loss_of = nn.functional.binary_cross_entropy_with_logits\n"
        "mt.broadcast_parameters(G, root_rank=0)\nmt.broadcast_parameters(D, root_rank=0)\n",
        after="assert all(each.requires_grad for each in D.parameters())",
    ),
    ("tutorial.md", "optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), op=mt.Sum)"): Snippet(
        before=JOINED + "batch = torch.arange(3)\nshard = batch[mt.rank() :: mt.size()]\n",
        after="loss.backward()\noptimizer.step()",
    ),
    (
        "tutorial.md",
        "optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=4)",
    ): Snippet(
        before=JOINED,
        after="[cross_entropy(model(images), labels).backward() for _ in range(4)]\noptimizer.step()",
    ),
    (
        "tutorial.md",
        "optimizer.synchronize()  # average the gradients now, after any number of backward passes",
    ): Snippet(before=SHARED + "cross_entropy(model(images), labels).backward()\n", after="assert mt.size() == 2"),
    ("jax.md", "mj.init()"): Snippet(
        before="""
import jax.numpy as jnp
parameters, batch = {"w": jnp.ones(3)}, jnp.ones((4, 3))
loss_of = lambda parameters, batch: ((batch @ parameters["w"]) ** 2).mean()
""",
        after="parameters, state, loss = step(parameters, state, batch)\nassert abs(float(loss) - 9) < 1e-5",
        framework="jax",
    ),
    ("tensorflow.md", "mt.init()"): Snippet(
        before="""
import keras, tensorflow as tf
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
loss_of = lambda found, wanted: tf.reduce_mean((found - wanted) ** 2)
""",
        after="ones = tf.ones((4, 4), model.compute_dtype)\nassert float(step(ones, ones[:, :1])) >= 0",
        framework="keras",
    ),
    ("keras.md", "mk.init()"): Snippet(
        before=FITTING
        + """
import keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
""",
        instead=("epochs=10", "epochs=1, verbose=0"),
        after="assert mk.size() == 2",
        framework="keras",
    ),
    ("keras.md", "optimizer = mk.DistributedOptimizer(keras.optimizers.SGD(0.1 * mk.size()))"): Snippet(
        before=FITTING
        + """
import keras
import multiring.keras as mk
mk.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
""",
        framework="keras",
    ),
}
# Blocks that are not run here: the reason, or the test that runs them.
NOT_RUN = {
    (
        "vision_start.md",
        "def draw(shape: str) -> Image.Image:",
    ): "tests/frameworks/vision/test_vision_start_page.py runs it",
    ("adapters.md", "for result in conformance.run(ADAPTER):"): "takes minutes; tests/frameworks/test_conformance.py",
    (
        "caffe.md",
        "mc.init()  # before the solver is made",
    ): "needs Caffe; tests/frameworks/caffe/test_caffe.py fakes it",
    (
        "chainer.md",
        "import multiring.chainer as chainermn",
    ): "needs an older NumPy; tests/frameworks/chainer/test_chainer.py",
    (
        "gpu.md",
        "mt.init()  # selects this rank's GPU when the program first uses CUDA",
    ): "needs CUDA; tests/cuda/test_collectives_on_devices.py",
    (
        "data.md",
        "watch = mt.measure_bottleneck(loader)",
    ): "needs more steps than the loader has; tests/wire/test_data_balance.py",
    ("group_on_gpu.md", "host = multiring.init()"): "needs GPUs; tests/cuda/test_group.py calls this on stand-ins",
    ("four_ways.md", "..."): "lines of a program that tests/frameworks/test_four_ways.py runs",
    ("guide_spark.md", "def train(rate):"): "tests/clusters/test_spark.py runs it on a cluster, as a driver",
    (
        "guide_spark.md",
        "def train_with_horovod(rate):",
    ): "tests/clusters/test_spark.py runs it on a cluster, as a driver",
    ("guide_spark.md", 'if __name__ == "__main__":'): "tests/clusters/test_spark.py runs it on a cluster, as a driver",
    ("guide_dask.md", "def train(rate):"): "tests/clusters/test_dask.py runs it on a cluster, as a driver",
    ("guide_ray.md", "def train(rate):"): "tests/clusters/test_ray.py runs it on a cluster, as a driver",
    ("guide_ray.md", "def train_with_horovod(rate):"): "tests/clusters/test_ray.py runs it on a cluster, as a driver",
    ("guide_slurm.md", "group = multiring.init()"): "tests/slurm/test_guide.py runs it under Slurm",
    ("guide_mpiexec.md", "group = multiring.init()"): "tests/wire/test_mpiexec_guide.py runs it under mpiexec",
    ("guide_torchrun.md", "mt.init()"): "tests/hosts/test_torchrun_hosts.py runs it under torchrun",
    ("run.md", "def train(rate):"): "starts ranks itself, like a command; test_a_function_is_run_on_ranks",
}


def live(_: Here, title: tuple[str, str], text: str, folder: str) -> None:
    """Run the snippet `text` with the program around it, as a rank."""
    snippet = SNIPPETS[title]
    os.chdir(folder)
    program = ModuleType("__main__")
    sys.modules["__main__"] = program
    text = text.replace(*snippet.instead) if snippet.instead[0] else text
    for part, name in ((snippet.before, "before"), (text, f"{title[0]}: {title[1]}"), (snippet.after, "after")):
        exec(compile(part, name, "exec"), vars(program))  # noqa: S102 -- the code is the page's

"""Calls and states whose structures differ on the last rank, for test_structures.py.

Some frameworks run in environments without pytest.
"""

import importlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.support.nursery import Here
from tests.support.one_rank_differs import wrong_calls

from multiring._frontend import array_rows, lifecycle
from multiring._frontend.elastic.state import ObjectState
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.requests import error_of

Case = tuple[str, Callable[[], object]]  # a word of the error, and the call that raises it
Cases = Mapping[str, Case]
RIGHT = ""  # in place of the word: the call must raise nothing
COLLECTIVES = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")


def everything(here: Here, framework: str, calls: int) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Make the calls of a framework, and then random ones; see `outcomes` and `wrong_calls`."""
    return outcomes(here, framework), wrong_calls(framework, 7, calls) if calls else []


def outcomes(here: Here, framework: str) -> dict[str, tuple[str, str]]:
    """Make each call of a framework; return the word and the error by the name of the call, as "class: text"."""
    odd, found = here.rank == here.size - 1, {}
    for name, (word, call) in CASES[framework](odd=odd).items():
        try:
            call()
            told = "no error"
        except Exception as error:  # noqa: BLE001 -- its type depends on the framework
            known = error_of(error) or error
            kinds = [each.__name__ for each in type(known).__mro__]
            told = f"{'MismatchError' if 'MismatchError' in kinds else kinds[0]}: {known}"
        found[name] = word, told
        assert allgather_object(here.rank) == list(range(here.size)), name  # the ranks are in step
    return found


def array_cases(*, odd: bool) -> Cases:
    """Return the cases of NumPy's arrays, which adapters for eager frameworks use."""
    lifecycle.init()
    three = [np.ones(4, np.float32)] * (2 + odd)
    state = ObjectState(broadcast_object, lifecycle.rank, allgather_object, **{"epoch" if odd else "batch": 1})
    return {
        "grouped_allreduce": ("rank 1: 1 of 3", lambda: array_rows.grouped_allreduce(three, name="group")),
        "grouped_allgather": ("rank 1: 1 of 3", lambda: array_rows.grouped_allgather(three)),
        "grouped_reducescatter": ("rank 1: 1 of 3", lambda: array_rows.grouped_reducescatter(three)),
        "state": ("rank 1: attribute 'epoch'", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: attribute 'epoch'", state.sync),
    }


def torch_cases(*, odd: bool) -> Cases:
    """Return the cases of PyTorch."""
    torch, mt = importlib.import_module("torch"), importlib.import_module("multiring.torch")
    mt.init()
    one, name = torch.ones(4), "second" if odd else "first"
    typed, three = [one, torch.ones(4, dtype=torch.float16 if odd else torch.float32)], [one] * (2 + odd)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
    kind = torch.optim.Adam if odd else torch.optim.SGD
    optimizer = kind([torch.nn.Parameter(one)], lr=0.1)
    path = Path(tempfile.gettempdir()) / "multiring-never-written"
    state, of_models = (mt.elastic.TorchState(**{name: value}) for value in (1, torch.nn.Linear(2, 2)))
    table, some = torch.eye(3).to_sparse(), one.to_sparse() if odd else one
    return {
        "sparse": ("rank 0: allreduce; rank 1: sparse allreduce", lambda: mt.allreduce(some, name="some")),
        "sparse without a name": ("rank 0: allreduce; rank 1: sparse allreduce", lambda: mt.allreduce(some)),
        "all sparse": (RIGHT, lambda: mt.allreduce(one.to_sparse(), name="some")),
        "sparse in a group": (
            "rank 0: grouped allreduce; rank 1: sparse allreduce",
            lambda: mt.grouped_allreduce([some, one, one], name="group"),
        ),
        "sparse in a group without a name": (
            "rank 0: grouped allreduce; rank 1: allreduce",
            lambda: mt.grouped_allreduce([one, some]),
        ),
        "another one of a group is sparse": (
            "rank 0: sparse allreduce; rank 1: allreduce",
            lambda: mt.grouped_allreduce([one, table] if odd else [table, one], name="group"),
        ),
        "more sparse ones in a group": (
            "rank 0: 1 of 2; rank 1: 1 of 3",
            lambda: mt.grouped_allreduce([table] * (2 + odd), name="group"),
        ),
        "a group of sparse ones": (RIGHT, lambda: mt.grouped_allreduce([table] * 3, name="group")),
        "sparse dimensions": ("rank 0: 2; rank 1: 1", lambda: mt.allreduce(torch.eye(3).to_sparse(1 if odd else 2))),
        "sparse types": ("rank 0: float32; rank 1: float64", lambda: mt.allreduce(table.double() if odd else table)),
        "grouped_allreduce": ("rank 1: 1", lambda: mt.grouped_allreduce(typed, name="group")),
        "the same again with all types": (RIGHT, lambda: mt.grouped_allreduce([one, one.half()], name="group")),
        "grouped_allgather": ("rank 1: 1 of 3", lambda: mt.grouped_allgather(three, name="group")),
        "grouped_reducescatter": ("rank 1: 1 of 3", lambda: mt.grouped_reducescatter(three)),
        "broadcast_parameters": ("rank 1: second.weight", lambda: mt.broadcast_parameters(model, root_rank=0)),
        "of a dict": ("rank 1: second.weight", lambda: mt.broadcast_parameters(model.state_dict(), root_rank=0)),
        "broadcast_optimizer_state": ("optimizer Adam", lambda: mt.broadcast_optimizer_state(optimizer, root_rank=0)),
        "DistributedOptimizer": (
            "rank 1: second.weight",
            lambda: mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()),
        ),
        "gather": ("rank 1: outputs is a dict of 'second'", lambda: mt.gather({name: one})),
        "mean": ("rank 1: second", lambda: mt.mean({name: 1.0})),
        "save": ("parts second", lambda: mt.save(path, **{name: 1})),
        "state": ("rank 0: attribute 'first'", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 0: attribute 'first'", state.sync),
        "state of models": ("rank 1: attribute 'second'", lambda: of_models.must_sync(wanted=True)),
        "sync of the state of models": ("rank 1: attribute 'second'", of_models.sync),
    }


def jax_cases(*, odd: bool) -> Cases:
    """Return the cases of JAX."""
    jax, mj = importlib.import_module("jax"), importlib.import_module("multiring.jax")
    mj.init()
    one, rows = jax.numpy.ones(6), jax.numpy.ones(8 if odd else 6)
    tree, word = {"a": one, ("c" if odd else "b"): [one, one]}, "rank 1: array 2 of 3 is ['c'][0], float32"
    identity = SimpleNamespace(init=None, update=lambda found, *_: found)
    optimizer, state = mj.distribute(identity), mj.elastic.JaxState(**{"second" if odd else "first": one})

    def ended(call: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], object]:
        return lambda: jax.block_until_ready(call(*arguments, **options))

    def typed(dtype: str) -> Any:
        return {"a": one, "b": one.astype(dtype if odd else "float32"), "c": one}

    found: dict[str, Case] = {each: (word, ended(getattr(mj, each), tree)) for each in COLLECTIVES}
    return found | {
        "allreduce under jit": (word, ended(jax.jit(mj.allreduce), tree)),
        "allgather with a name": (word, ended(jax.jit(lambda each: mj.allgather(each, name="named")), tree)),
        "distribute": (word, ended(jax.jit(optimizer.update), tree, ())),
        "types": ("rank 1: array 2 of 3 is ['b'], float16", ended(mj.allreduce, typed("float16"))),
        "types with a name": ("rank 1: array 2 of 3 is ['b'], int8", ended(mj.broadcast, typed("int8"), name="typed")),
        "types of rows": ("rank 1: array 2 of 3 is ['b'], int8", ended(mj.allgather, typed("int8"))),
        "an empty tree": ("(a tree without arrays)", ended(mj.allreduce, {} if odd else tree)),
        "no tree": ("rank 1: an array without keys", ended(mj.allreduce, one if odd else {"a": one})),
        "rows": ("rank 0: (6,); rank 1: (8,)", ended(mj.allgather, rows)),
        "rows under jit": ("rank 0: (6,); rank 1: (8,)", ended(jax.jit(mj.allgather), rows)),
        "rows of alltoall": ("rank 0: (6,); rank 1: (8,)", ended(mj.alltoall, rows)),
        "another collective": ("rank 1: reducescatter", ended(mj.reducescatter if odd else mj.allreduce, one)),
        "state": ("rank 1: attribute 'second'", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: attribute 'second'", state.sync),
    }


def tensorflow_cases(*, odd: bool) -> Cases:
    """Return the cases of TensorFlow."""
    tf, mt = importlib.import_module("tensorflow"), importlib.import_module("multiring.tensorflow")
    mt.init()
    one = tf.ones(4)
    typed, three = [one, tf.ones(4, tf.float16 if odd else tf.float32)], [one] * (2 + odd)
    variables = [tf.Variable(one, name="first"), tf.Variable(one, name="second")][:: -1 if odd else 1]
    state = mt.elastic.TensorFlowState(variables, **{"second" if odd else "first": 1})

    def graph(call: Callable[[], Any]) -> Callable[[], Any]:
        found: Callable[[], Any] = tf.function(call, autograph=False)
        return found

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * variables[1])
        return mt.DistributedGradientTape(tape).gradient(loss, variables)

    return {
        "types": ("rank 1: array 2 of 2 is [1], float16", lambda: mt.grouped_allreduce(typed)),
        "types in a graph": ("rank 1: array 2 of 2 is [1], float16", graph(lambda: mt.grouped_allreduce(typed))),
        "types of rows": ("rank 1: array 2 of 2 is [1], float16", lambda: mt.grouped_allgather(typed, name="rows")),
        "grouped_allgather": ("rank 1: array 3 of 3", lambda: mt.grouped_allgather(three, name="group")),
        "grouped_reducescatter": ("rank 1: array 3 of 3", lambda: mt.grouped_reducescatter(three)),
        "a group of one": ("rank 0: there is only 1 array", lambda: mt.grouped_allreduce(three[1:], name="group")),
        "broadcast_variables": ("rank 1: array 1 of 2 is second", lambda: mt.broadcast_variables(variables, 0)),
        "in a graph": (
            "rank 1: array 1 of 2 is second",
            graph(lambda: [tf.identity(each) for each in mt.broadcast_(variables, 0)]),
        ),
        "DistributedGradientTape": ("rank 1: array 1 of 2 is second", gradients),
        "state": ("rank 1: attribute 'second'", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: attribute 'second'", state.sync),
    }


def keras_cases(*, odd: bool) -> Cases:
    """Return the cases of Keras."""
    keras, mk = importlib.import_module("keras"), importlib.import_module("multiring.keras")
    mk.init()
    if odd:  # Keras numbers the layers of a process, so the following ones have other numbers here
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])

    def model(*names: str | None) -> Any:
        layers = [keras.layers.Dense(3, **({} if name is None else {"name": name})) for name in names]
        return keras.Sequential([keras.Input((3,)), *layers])

    def trained() -> None:
        made = model("b", "a") if odd else model("a", "b")
        made.compile(mk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        made.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)

    typed = [keras.Variable(np.ones(2), dtype="float16" if odd else "float32", name="typed")]
    numbered, named = model(None, None), model("second" if odd else "first")
    state = mk.elastic.KerasState(named, **{"second" if odd else "first": 1})
    return {
        "numbers of layers": (RIGHT, lambda: mk.broadcast_variables(numbered.variables)),
        "names": ("rank 1: sequential/second/kernel", lambda: mk.broadcast_variables(named.variables)),
        "types": ("rank 1: typed, float16", lambda: mk.broadcast_variables(typed)),
        "DistributedOptimizer": ("rank 1: array 1 of 4 is sequential/b/kernel", trained),
        "state": ("rank 1: attribute 'second'", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: attribute 'second'", state.sync),
    }


def chainer_cases(*, odd: bool) -> Cases:
    """Return the cases of Chainer."""
    chainer, mc = importlib.import_module("chainer"), importlib.import_module("multiring.chainer")
    elastic = importlib.import_module("multiring.chainer.elastic")
    communicator = mc.create_communicator("naive")
    model = chainer.Chain(**{"second" if odd else "first": chainer.links.Linear(2, 2)})
    model.cleargrads()
    state = elastic.ChainerState(model)
    return {
        "bcast_data": ("rank 1: /second/", lambda: communicator.bcast_data(model)),
        "multi_node_mean_grad": ("/second/", lambda: communicator.multi_node_mean_grad(model, zero_fill=True)),
        "state": ("rank 1: model/second/", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: model/second/", state.sync),
    }


def caffe_cases(*, odd: bool) -> Cases:
    """Return the cases of Caffe."""
    caffe, mc = importlib.import_module("caffe"), importlib.import_module("multiring.caffe")
    support = importlib.import_module("tests.support.caffe_ranks")
    elastic = importlib.import_module("multiring.caffe.elastic")
    mc.init()
    net = support.SHARED.format(width=3).replace('"one"', '"second"' if odd else '"first"')
    with tempfile.TemporaryDirectory() as folder:
        solver = caffe.get_solver(str(support.solver_file(Path(folder), "net", net)))
    state = elastic.CaffeState(solver)
    return {
        "state": ("rank 1: second.0", lambda: state.must_sync(wanted=True)),
        "sync of the state": ("rank 1: second.0", state.sync),
        "distribute": ("rank 1: second.0", lambda: mc.distribute(solver)),
    }


CASES: Mapping[str, Callable[..., Cases]] = {
    "numpy": array_cases,
    "torch": torch_cases,
    "jax": jax_cases,
    "tensorflow": tensorflow_cases,
    "keras": keras_cases,
    "chainer": chainer_cases,
    "caffe": caffe_cases,
}

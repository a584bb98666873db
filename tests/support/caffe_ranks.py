"""Jobs that ranks run in tests of multiring.caffe.

The module `caffe` is pycaffe or its stand-in, tests/support/caffe_standin.
"""

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.nursery import Here

from multiring.errors import ArgumentError, MismatchError

BATCH = 4
NET = """
layer {{ name: "records" type: "Data" top: "data" top: "label" include {{ phase: TRAIN }}
         data_param {{ source: "{data}" batch_size: 4 backend: LMDB }} }}
layer {{ name: "records" type: "Data" top: "data" top: "label" include {{ phase: TEST }}
         data_param {{ source: "{data}" batch_size: 4 backend: LMDB }} }}
layer {{ name: "first" type: "InnerProduct" bottom: "data" top: "first"
         inner_product_param {{ num_output: 6 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "relu" type: "ReLU" bottom: "first" top: "hidden" }}
layer {{ name: "last" type: "InnerProduct" bottom: "hidden" top: "last"
         inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "last" bottom: "label" top: "loss" }}
layer {{ name: "accuracy" type: "Accuracy" bottom: "last" bottom: "label" top: "accuracy" include {{ phase: TEST }} }}
"""
SHARED = """
layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: 2 dim: {width} }} }} }}
layer {{ name: "one" type: "InnerProduct" bottom: "data" top: "one" param {{ name: "w" }} param {{ name: "b" }}
         inner_product_param {{ num_output: {width} weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "two" type: "InnerProduct" bottom: "one" top: "two" param {{ name: "w" }} param {{ name: "b" }}
         inner_product_param {{ num_output: {width} weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "sum" type: "Reduction" bottom: "two" top: "sum" loss_weight: 1 }}
"""


def records(folder: Path) -> Path:
    """Write the records that the Data layers read; return the file's path."""
    dice = np.random.default_rng(8)
    path = folder / "records.npz"
    data = dice.standard_normal((24, 5)).astype(np.float32)
    np.savez(path, data=data, label=data[:, :3].argmax(1))
    return path


def solver_file(folder: Path, name: str, net: str, *lines: str) -> Path:
    """Write the prototxt files of a net and its solver; return the solver's path."""
    (folder / f"{name}_net.prototxt").write_text(net, encoding="utf-8")
    path = folder / f"{name}.prototxt"
    text = [f'net: "{folder / f"{name}_net.prototxt"}"', "base_lr: 0.5", 'lr_policy: "fixed"', "max_iter: 6", *lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def everything(here: Here, folder: str) -> None:
    caffe: Any = importlib.import_module("caffe")
    mc: Any = importlib.import_module("multiring.caffe")
    mc.init()
    own = Path(folder) / f"rank{here.rank}"
    own.mkdir()
    np.random.seed(here.rank)  # noqa: NPY002 -- seeds Caffe's fillers: ranks start with different weights
    trains_as_one(caffe, mc, Path(folder), own)
    shares_weights(caffe, mc, own)
    tests_and_writes_on_the_first_rank(caffe, mc, Path(folder), own)
    solves_and_knows_its_thread(caffe, mc, Path(folder), own)
    warns_of_solvers_made_too_early(caffe, mc, Path(folder), own)
    mistakes(caffe, mc, own)
    mc.shutdown()


def trains_as_one(caffe: Any, mc: Any, folder: Path, own: Path) -> None:
    """Ranks compute the updates of one process that has all their batches.

    The solver uses iter_size, gradient clipping, momentum and weight decay.
    """
    net = NET.format(data=folder / "records.npz")
    options = ("momentum: 0.9", "weight_decay: 0.01")
    # The reference process accumulates as many batches as all ranks together. It reads the same records in another
    # order.
    alone = _alone(caffe, mc, own, net, options)
    clip = "clip_gradients: 0.7"
    solver = caffe.get_solver(str(solver_file(own, "several", net, "iter_size: 2", clip, *options)))
    mc.distribute(solver)
    for layer, blobs in alone["first"].items():
        for blob, value in zip(solver.net.params[layer], blobs, strict=True):
            blob.data[...] = value
    solver.step(3)
    assert solver.iter == 3
    for layer, blobs in alone["last"].items():
        for blob, value in zip(solver.net.params[layer], blobs, strict=True):
            np.testing.assert_allclose(blob.data, value, atol=2e-6)
    told = mc.allgather_object([blob.data.tobytes() for blobs in solver.net.params.values() for blob in blobs])
    assert told == [told[0]] * mc.size()


def _alone(caffe: Any, mc: Any, own: Path, net: str, options: tuple[str, ...]) -> dict[str, Any]:
    found = None
    if mc.rank() == 0:
        caffe.set_solver_count(1)
        caffe.set_solver_rank(0)
        # Caffe clips the accumulated gradient before it divides the gradient by iter_size.
        clip = f"clip_gradients: {0.7 * mc.size()}"
        solver = caffe.get_solver(str(solver_file(own, "alone", net, f"iter_size: {2 * mc.size()}", clip, *options)))
        found = {"first": {layer: [blob.data.copy() for blob in blobs] for layer, blobs in solver.net.params.items()}}
        solver.step(3)
        found["last"] = {layer: [blob.data.copy() for blob in blobs] for layer, blobs in solver.net.params.items()}
    mc.set_solver_rank()
    shared: dict[str, Any] = mc.broadcast_object(found)
    return shared


def shares_weights(caffe: Any, mc: Any, own: Path) -> None:
    """A parameter that two layers share is averaged once.

    The nets of two solvers that step in turns must not affect each other.
    """
    solvers = [caffe.get_solver(str(solver_file(own, f"w{width}", SHARED.format(width=width)))) for width in (3, 4)]
    for solver in solvers:
        mc.distribute(solver)
    for solver in (*solvers, solvers[0]):
        params = solver.net.params
        before = params["one"][0].data.copy()
        solver.net.blobs["data"].data[...] = mc.rank() + 1
        seen: list[Any] = []
        solver.add_callback(lambda: None, lambda solver=solver, seen=seen: seen.append(_diff(solver)))
        solver.step(1)
        # The loss is a sum, so its gradients are affine in the input: their mean over the ranks is the gradient at the
        # mean input.
        mean = np.full((2, before.shape[0]), (mc.size() + 1) / 2, np.float32)
        bias = params["one"][1].data + 0.5 * seen[0][1]
        ones = np.ones_like(mean)
        wanted = ones.T @ (mean @ before.T + bias) + (ones @ before).T @ mean
        np.testing.assert_allclose(seen[0][0], wanted, rtol=1e-5)
        np.testing.assert_allclose(params["two"][0].data, before - 0.5 * wanted, rtol=1e-4, atol=1e-5)


def _diff(solver: Any) -> list[Any]:
    return [blob.diff.copy() for blob in solver.net.params["one"]]


def tests_and_writes_on_the_first_rank(caffe: Any, mc: Any, folder: Path, own: Path) -> None:
    net = NET.format(data=folder / "records.npz")
    lines = ("test_interval: 2", "test_iter: 2", "snapshot: 2", f'snapshot_prefix: "{own / "kept"}"')
    solver = mc.distribute(caffe.get_solver(str(solver_file(own, "testing", net, *lines))), compression="bf16")
    solver.step(4)
    kept = sorted(each.name for each in own.glob("kept_*"))
    wanted = [f"kept_iter_{step}.{kind}" for step in (2, 4) for kind in ("caffemodel", "solverstate")]
    assert kept == (wanted if mc.rank() == 0 else []), kept
    assert len(solver.standin_tests) == 2 * (mc.rank() == 0)


def solves_and_knows_its_thread(caffe: Any, mc: Any, folder: Path, own: Path) -> None:
    net = (
        NET.format(data=folder / "records.npz").replace('"Data"', '"HDF5Data"').replace("data_param", "hdf5_data_param")
    )
    lines = ("test_interval: 2", "test_iter: 1", f'snapshot_prefix: "{own / "solved"}"')
    path = str(solver_file(own, "solving", net, *lines))
    solver = mc.distribute(caffe.get_solver(path))
    solver.solve()  # Caffe itself allows solve() only on the first solver
    solver.step(1)
    solver.snapshot()
    kept = sorted(each.name for each in own.glob("solved_*.caffemodel"))
    assert kept == (["solved_iter_6.caffemodel", "solved_iter_7.caffemodel"] if mc.rank() == 0 else []), kept
    labels = mc.allgather(solver.net.blobs["label"].data[None])
    assert (labels[0] != labels[1]).any(), "both ranks read the same rows"
    refused: list[str] = []

    def make_elsewhere() -> None:
        with pytest.raises(
            ArgumentError, match="Caffe counts 1 solvers on this thread, but there are 2 ranks"
        ) as raised:
            mc.distribute(caffe.get_solver(path))
        refused.append(str(raised.value))
        mc.set_solver_rank()
        mc.distribute(caffe.get_solver(path)).step(1)

    thread = threading.Thread(target=make_elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1


def warns_of_solvers_made_too_early(caffe: Any, mc: Any, folder: Path, own: Path) -> None:
    net = NET.format(data=folder / "records.npz")
    for count, rank, want in ((1, 0, mc.rank() == 0), (mc.size(), mc.rank(), False)):
        caffe.set_solver_count(count)
        caffe.set_solver_rank(rank)
        solver = caffe.get_solver(str(solver_file(own, "early", net)))
        mc.set_solver_rank()
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, logged=logged: logged.append(record.getMessage())  # type: ignore[method-assign, misc]
        logging.getLogger("multiring").addHandler(handler)
        mc.distribute(solver).step(2)
        logging.getLogger("multiring").removeHandler(handler)
        assert [each for each in logged if "read the same records" in each] == logged
        assert len(logged) == want, logged


def mistakes(caffe: Any, mc: Any, own: Path) -> None:
    path = solver_file(own, "wrong", SHARED.format(width=3 + mc.rank()))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: mc.distribute(object()), ArgumentError, "takes a solver of pycaffe"),
        (lambda: mc.distribute(caffe.get_solver(str(path)), compression="int4"), ArgumentError, "compression='int4'"),
        (lambda: mc.distribute(caffe.get_solver(str(path))), MismatchError, "the ranks differ"),
        (lambda: mc.train(str(own / "nowhere")), ArgumentError, "there is no file"),
        (lambda: mc.train(str(path), snapshot="a", weights=["b"]), ArgumentError, "not both"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    solver = mc.distribute(caffe.get_solver(str(solver_file(own, "right", SHARED.format(width=3)))))
    with pytest.raises(ArgumentError, match="distribute was already called for this solver"):
        mc.distribute(solver)

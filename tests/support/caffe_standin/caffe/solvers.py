"""Stochastic gradient descent with the same order of steps as in Caffe."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from caffe.nets import TEST, TRAIN, Net
from caffe.prototxt import one, read
from caffe.settings import Place, check_root_solver


class SGDSolver:
    """A solver configured by a prototxt file."""

    def __init__(self, path: str) -> None:
        self._message = read(path)
        self.iter = 0
        self.net = Net(one(self._message, "net"), TRAIN)
        self.test_nets = []
        if one(self._message, "test_iter") is not None:  # all ranks have the test net, though only rank 0 tests
            self.test_nets.append(Net(one(self._message, "net"), TEST))
        self.param = SimpleNamespace(max_iter=one(self._message, "max_iter", 0))
        self._history = [np.zeros_like(blob.data) for blob, _, _ in self.net.rates]
        self._callbacks: list[Any] = []
        self.standin_tests: list[dict[str, float]] = []

    def add_callback(self, on_start: Any, on_gradients_ready: Any) -> None:
        self._callbacks.append((on_start, on_gradients_ready))

    def step(self, iterations: int) -> None:
        for _ in range(iterations):
            self.net.clear_param_diffs()
            interval = one(self._message, "test_interval", 0)
            if interval and self.iter % interval == 0 and Place.rank == 0:
                self._test()
            for on_start, _ in self._callbacks:
                on_start()
            for _ in range(one(self._message, "iter_size", 1)):
                self.net.forward()
                self.net.backward()
            for _, on_gradients_ready in self._callbacks:
                on_gradients_ready()
            self._apply_update()
            self.iter += 1
            interval = one(self._message, "snapshot", 0)
            if interval and self.iter % interval == 0 and Place.rank == 0:
                self.snapshot()

    def solve(self, resume_file: str | None = None) -> None:
        check_root_solver()
        if resume_file:
            self.restore(resume_file)
        self.step(self.param.max_iter - self.iter)
        interval = one(self._message, "snapshot", 0)
        if one(self._message, "snapshot_after_train", default=True) and not (interval and self.iter % interval == 0):
            self.snapshot()
        if one(self._message, "test_interval", 0):
            self._test()

    def snapshot(self) -> None:
        check_root_solver()
        name = f"{one(self._message, 'snapshot_prefix')}_iter_{self.iter}"
        self.net.save(f"{name}.caffemodel")
        with open(f"{name}.solverstate", "wb") as file:  # noqa: PTH123 -- given a path, NumPy would append .npz
            np.savez(file, *self._history, iteration=self.iter, model=f"{name}.caffemodel")

    def restore(self, path: str) -> None:
        with np.load(path) as kept:
            self.iter = int(kept["iteration"])
            self.net.copy_from(str(kept["model"]))
            for number, history in enumerate(self._history):
                history[...] = kept[f"arr_{number}"]

    def _apply_update(self) -> None:
        passes = one(self._message, "iter_size", 1)
        limit = one(self._message, "clip_gradients", -1)
        rates = self.net.rates
        if limit >= 0:
            norm = float(np.sqrt(sum(float((blob.diff**2).sum()) for blob, _, _ in rates)))
            if norm > limit:
                for blob, _, _ in rates:
                    blob.diff[...] *= limit / norm
        rate, momentum = one(self._message, "base_lr", 0.01), one(self._message, "momentum", 0)
        decay = one(self._message, "weight_decay", 0)
        for (blob, rate_factor, decay_factor), history in zip(rates, self._history, strict=True):
            slope = blob.diff / passes + decay * decay_factor * blob.data
            history[...] = momentum * history + rate * rate_factor * slope
            blob.diff[...] = history
            blob.data[...] -= blob.diff

    def _test(self) -> None:
        for net in self.test_nets:
            for name, blobs in net.params.items():
                for number, blob in enumerate(blobs):
                    blob.data[...] = self.net.params[name][number].data
            rounds = [
                {name: float(each) for name, each in net.forward().items()}
                for _ in range(one(self._message, "test_iter"))
            ]
            self.standin_tests.append({name: float(np.mean([each[name] for each in rounds])) for name in rounds[0]})


def get_solver(path: str) -> SGDSolver:
    """Return the solver that a prototxt file configures."""
    return SGDSolver(path)

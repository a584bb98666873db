"""One rank of the part "jax" of `multiring verify gpu`: python jax_programs.py jax RESULT PYTHON..."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("jax") is None:
    Path(sys.argv[2]).write_text(json.dumps({"not_run": "it needs JAX with CUDA; JAX is not installed"}), "utf-8")
    sys.exit()

import jax
import jax.numpy as jnp
import numpy as np

import multiring.jax as mj
from multiring.jax.devices import platform_here

_STEPS, _ROWS, _RUNS, _SEED = 20, 8, 20, 7


def _collectives() -> dict[str, int]:
    """Return how many results of random arrays differ from the host's sums, by what was called."""
    size, rank, draws = mj.size(), mj.rank(), np.random.default_rng(_SEED)
    wrong = dict.fromkeys(("allreduce", "allreduce in jit", "allgather", "broadcast", "reducescatter"), 0)
    # Each call follows work on the device that it must wait for, and the result goes into more such work.
    late = jax.jit(lambda x: jnp.sort(jnp.sort(x)[::-1])[::-1])
    inside = jax.jit(lambda x: late(mj.allreduce(late(x), "sum")) * 2)
    for _ in range(_RUNS):
        count = size * int(draws.integers(1, 1 << int(draws.integers(2, 16))))
        rows = -np.sort(-draws.integers(-99, 99, (size, count)).astype(np.float32))
        own, total = jnp.asarray(rows[rank][::-1]), rows.sum(0)
        wrong["allreduce"] += not np.array_equal(late(mj.allreduce(late(own), "sum")), -np.sort(-total))
        wrong["allreduce in jit"] += not np.array_equal(inside(own), -np.sort(-total) * 2)
        wrong["allgather"] += not np.array_equal(mj.allgather(late(own)), rows.reshape(-1))
        wrong["broadcast"] += not np.array_equal(mj.broadcast(late(own), size - 1), rows[-1])
        part = count // size
        found = mj.reducescatter(late(own), "sum")
        wrong["reducescatter"] += not np.array_equal(found, total[rank * part : (rank + 1) * part])
    return wrong


def _distance() -> float:
    """Return the largest relative difference of a loss of all ranks from that of one process."""
    size, rank, draws = mj.size(), mj.rank(), np.random.default_rng(_SEED)
    images = draws.normal(size=(_STEPS, size * _ROWS, 16)).astype(np.float32)
    targets = draws.normal(size=(_STEPS, size * _ROWS, 4)).astype(np.float32)
    first = {"in": draws.normal(size=(16, 32)).astype(np.float32) / 4, "out": np.zeros((32, 4), np.float32)}

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jnp.square(jnp.tanh(x @ weights["in"]) @ weights["out"] - y).mean()

    def train(rows: slice, *, alone: bool) -> list[float]:
        def step(weights: Any, x: Any, y: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
            if not alone:
                gradients, loss = mj.allreduce((gradients, loss))
            return jax.tree.map(lambda each, gradient: each - 0.1 * gradient, weights, gradients), loss

        compiled, weights, losses = jax.jit(step), first, []
        for number in range(_STEPS):
            weights, loss = compiled(weights, images[number, rows], targets[number, rows])
            losses.append(loss)
        return [float(each) for each in losses]

    own = np.array(train(slice(rank * _ROWS, (rank + 1) * _ROWS), alone=False))
    expected = np.array(train(slice(None), alone=True))
    return float((np.abs(own - expected) / np.abs(expected)).max())


def _mismatch() -> str:
    try:
        jax.block_until_ready(mj.allreduce(jnp.ones(3 + mj.rank())))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "no error"


def main() -> None:
    """Run the part on this rank."""
    target = Path(sys.argv[2])
    mj.init()
    if platform_here() != "cuda":
        if mj.rank() == 0:
            reason = f"it needs JAX with CUDA; JAX {jax.__version__} computes on {platform_here()}"
            target.write_text(json.dumps({"not_run": reason}), encoding="utf-8")
        return
    checks = [
        (f"{name}: {_RUNS} random arrays", count == 0, f"{count} wrong") for name, count in _collectives().items()
    ]
    far = _distance()
    checks.append((f"{_STEPS} steps in jit: the losses of one process to 1e-5", far < 1e-5, f"{far:.1e}"))
    told = _mismatch()
    checks.append(("shapes that differ", "(3,)" in told and "(4,)" in told, told[:300]))
    every = mj.allgather_object(checks)
    if mj.rank() == 0:
        found = [
            {
                "claim": same[0][0],
                "holds": all(each[1] for each in same),
                "found": "; ".join({each[2] for each in same}),
            }
            for same in zip(*every, strict=True)
        ]
        figures = {"JAX": jax.__version__, "device": str(jax.devices()[0].device_kind)}
        target.write_text(json.dumps({"checks": found, "figures": figures}), encoding="utf-8")


if __name__ == "__main__":
    main()

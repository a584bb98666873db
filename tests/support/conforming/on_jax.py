"""The adapter of JAX for the conformance suite.

Operations run eagerly; steps and gradients are compiled.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import multiring.jax as mj
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter
from multiring.jax.elastic import JaxState


def init(**options: Any) -> None:
    config: Any = jax.config
    config.update("jax_enable_x64", True)
    mj.init(**options)


def all_reduce(array: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return mj.allreduce(array, op, name=name, process_set=process_set)


def gradient(at: Any, weights: Any, op: str) -> Any:
    return np.asarray(jax.jit(jax.grad(lambda x: (mj.allreduce(x, op) * weights).sum()))(at))


def _loss(parameters: Any, slopes: Any) -> Any:
    return sum((parameters[name] * slope).sum() for name, slope in slopes.items())


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._parameters: Any = {name: jnp.asarray(value) for name, value in parameters.items()}
        self._state: Any = None
        plain = mj.distribute(_Descent(rate), process_set=process_set)
        self._step = jax.jit(partial(self._made_step, plain))

    @staticmethod
    def _made_step(optimizer: Any, parameters: Any, slopes: Any) -> Any:
        updates, _ = optimizer.update(jax.grad(_loss)(parameters, slopes), optimizer.init(parameters), parameters)
        return jax.tree.map(jnp.add, parameters, updates)

    def _held(self) -> Any:
        return self._parameters if self._state is None else self._state.parameters

    def step(self, slopes: Mapping[str, Any]) -> None:
        found = self._step(self._held(), dict(slopes))
        for each in found.values():
            each.block_until_ready()
        if self._state is None:
            self._parameters = found
        else:
            self._state.parameters = found

    def parameters(self) -> dict[str, Any]:
        return {name: np.array(each) for name, each in self._held().items()}

    def state(self, **values: Any) -> Any:
        self._state = JaxState(parameters=self._parameters, **values)
        return self._state


class _Descent:
    """Plain gradient descent with optax's interface."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def init(self, parameters: Any) -> Any:
        del parameters
        return ()

    def update(self, gradients: Any, state: Any, parameters: Any = None) -> Any:
        del parameters
        return jax.tree.map(lambda each: -self._rate * each, gradients), state


ADAPTER = Adapter(
    name="JAX",
    version=jax.__version__,
    make=jnp.asarray,
    back=np.asarray,
    all_reduce=all_reduce,
    trainer=Trainer,
    gradient=gradient,
    init=init,
)

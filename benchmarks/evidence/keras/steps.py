"""Define models with a `train_step` of their own, on each Keras backend.

benchmarks/evidence/keras/programs.py uses them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops


def stepped(model: Any, optimizer: Any, weights: Sequence[Any], loss_of: Callable[[], Any]) -> Any:
    """Take an optimizer step along the gradients of a loss, on TensorFlow or torch."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415 -- slow

        with tf.GradientTape() as tape:
            loss = loss_of()
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss
    import torch  # noqa: PLC0415 -- slow

    model.zero_grad()
    loss = loss_of()
    loss.backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in weights], weights)
    return loss


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with the train_step of Keras' guide "Customizing what happens in fit()"."""

    def train_step(self, *arguments: Any) -> Any:
        """Take a training step."""
        if keras.backend.backend() == "jax":
            return self._stateless(*arguments)
        (data,) = arguments
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        predicted: list[Any] = []

        def loss_of() -> Any:
            predicted[:] = [self(x, training=True)]
            return self.compute_loss(x=x, y=y, y_pred=predicted[0], sample_weight=weights)

        trained = list(self.trainable_weights)
        loss = stepped(self, self.optimizer, trained, loss_of)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted[0], sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics if metric.name == "loss"}

    def _stateless(self, state: Any, data: Any) -> Any:
        import jax  # noqa: PLC0415 -- slow

        trained, others, optimizer, metrics = state
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, found), grads = gradient(
            trained, others, metrics, x, y, weights, training=True, optimizer_variables=optimizer
        )
        loss, _, others, metrics = found
        trained, optimizer = self.optimizer.stateless_apply(optimizer, grads, trained)
        new = list(metrics)
        with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, metrics, strict=True))) as scope:
            self.metrics[0].update_state(loss)
            logs = {"loss": self.metrics[0].result()}
            new = [scope.get_current_value(each) for each in self.metrics_variables]
        return logs, (trained, others, optimizer, new)


def recording(noted: list[str]) -> Any:
    """Return a model that records the input of its `train_step` in `noted`."""

    class Recorder(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.mean = keras.metrics.Mean(name="loss")
            self.built = True

        def call(self, x: Any) -> Any:
            return ops.sum(keras.tree.flatten(x)[0]) * self.scale

        @property
        def metrics(self) -> list[Any]:
            return [self.mean]

        def train_step(self, *arguments: Any) -> Any:
            data = arguments[-1]
            noted.append(_described(data))
            leaf = keras.tree.flatten(data)[0]
            if keras.backend.backend() == "jax":
                return {"loss": ops.mean(leaf)}, arguments[0]

            def loss_of() -> Any:
                return ops.mean(leaf) * self.scale

            self.mean.update_state(stepped(self, self.optimizer, list(self.trainable_weights), loss_of))
            return {"loss": self.mean.result()}

    return Recorder()


def _described(data: Any) -> str:
    if isinstance(data, dict):
        return "{" + ", ".join(f"{name}: {_described(data[name])}" for name in sorted(data)) + "}"
    if isinstance(data, list | tuple):
        return f"{type(data).__name__}({', '.join(_described(each) for each in data)})"
    return "None" if data is None else f"{keras.backend.standardize_dtype(data.dtype)}{list(data.shape[1:])}"


class GAN(keras.Model):  # type: ignore[misc]
    """A model with two networks and two optimizers."""

    def __init__(self, width: int, place: str) -> None:
        super().__init__()

        self.judge = keras.Sequential([keras.Input((width,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
        self.place = place
        self.built = True

    def compile_two(self, judge: Any, maker: Any) -> None:
        """Store the optimizers as attributes, in a list, or hidden in a function."""
        super().compile(loss=None)
        self.crossed = keras.losses.BinaryCrossentropy(from_logits=True)
        if self.place == "attributes":
            self.judge_optimizer, self.maker_optimizer = judge, maker
        elif self.place == "list":
            self.both = [judge, maker]
        hidden = (judge, maker)
        self.optimizers_of: Any = lambda: hidden

    def train_step(self, real: Any) -> Any:
        """Train the judge and then the maker."""
        judge, maker = self.optimizers_of()
        noise = real[:, ::-1] if keras.backend.backend() == "tensorflow" else real.flip(1)
        ones = ops.ones_like(real[:, :1])

        def judged() -> Any:
            fake = self.crossed(ones, self.judge(self.maker(noise)))
            return fake + self.crossed(0.0 * ones, self.judge(real))

        def made() -> Any:
            return self.crossed(0.0 * ones, self.judge(self.maker(noise)))

        first = stepped(self, judge, list(self.judge.trainable_weights), judged)
        return {"judge": first, "maker": stepped(self, maker, list(self.maker.trainable_weights), made)}

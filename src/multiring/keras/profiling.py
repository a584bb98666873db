"""Tell a recording of steps about the updates of Keras' optimizers, on Keras' torch backend; for `multiring profile`.

Keras' optimizers are not torch's, so torch's hooks do not see their updates. This module imports no other module of
multiring.keras: it is imported while such a module may import Keras.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras


def follow_updates(update: Callable[[Callable[..., Any], Any, Any], Any]) -> bool:
    """Let `update` make each update of a Keras optimizer; return whether Keras' backend is torch.

    `update` is called with the optimizer's own update, the variables, and the optimizer.
    """
    if keras.backend.backend() != "torch":
        return False
    kind: Any = keras.optimizers.Optimizer
    plain = kind.apply

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables  # noqa: SLF001
        return update(partial(plain, optimizer, grads, trainable_variables), variables, optimizer)

    kind.apply = apply
    return True

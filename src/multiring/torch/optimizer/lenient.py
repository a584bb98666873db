"""DistributedOptimizer as Horovod's programs know it: a step that reduces does not mind what was done to gradients."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from multiring.torch.optimizer import optimizer
from multiring.torch.optimizer.distributed import Distributed


def _lenient(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, whose optimizers warn where multiring's raise, as such programs run on Horovod."""

    @wraps(make)
    def made(*arguments: Any, **keywords: Any) -> Any:
        shared = make(*arguments, **keywords)
        if isinstance(shared, Distributed):
            shared.be_lenient()
        return shared

    return made


DistributedOptimizer = _lenient(optimizer.DistributedOptimizer)

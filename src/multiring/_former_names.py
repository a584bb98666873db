"""Names that public packages had before. A program that uses one gets an error with the current name."""

import sys
from typing import NoReturn

# For each package or class: the former name, and what replaces it.
FORMER = {
    "multiring": {"round_trip": "quantize_dequantize", "take_events": "drain_events"},
    "multiring.caffe": {"shard": "set_solver_rank"},
    "multiring.convergence": {
        "Schedule": "LearningRateSchedule",
        "advise": "recommend_batch_size",
        "fit_law": "fit_critical_batch_size",
    },
    "multiring.data": {"joined": "merge_batches", "part_of": "shard_batch", "storage_of": "open_storage"},
    "multiring.jax": {
        "all_gather": "allgather",
        "all_reduce": "allreduce",
        "all_to_all": "alltoall",
        "reduce_scatter": "reducescatter",
    },
    "multiring.lab": {"Options": "LabOptions", "Plan": "LabPlan"},
    "multiring.torch": {
        "arena_like": "shared_zeros_like",
        "balance": "measure_bottleneck",
        "schedule": "schedule_learning_rate",
        "share_bucket": "allreduce_hook",
    },
    "NoiseWatch": {"advise": "recommend_batch_size"},
}
# Modules that had another name. At the former place is a module that calls `refuse_module`, for `import`.
FORMER_MODULES = {
    "multiring.frontend": "multiring.adapters",
    "multiring.gradients": "multiring.adapters",
    "multiring.optim": "multiring.convergence",
    "multiring.planner.mixes": "multiring.planner.parallelism",
}


def keep_to_public_names(package: str) -> None:
    """Let `dir` list only the public names of a package, and let a former name raise an error with the current one.

    The functions are set and not defined in the package, because mypy would accept every name of a package with a
    `__getattr__`.
    """
    module = sys.modules[package]

    def explain(name: str) -> NoReturn:
        refuse(package, name)

    vars(module).update(__getattr__=explain, __dir__=lambda: module.__all__)


def refuse_module(name: str) -> NoReturn:
    """Raise the error of the module `name`, which has another name now.

    Raises:
        ImportError: always; the message has the current name.
    """
    raise ImportError(f"{name} is now {FORMER_MODULES[name]}: use the new name", name=name)


def refuse(owner: str, name: str) -> NoReturn:
    """Raise the error of a package or class `owner` that has no attribute `name`.

    Raises:
        ImportError: the caller runs `from package import name`, and `name` is a former name. The import statement
            would replace an AttributeError by an error without the current name.
        AttributeError: in all other cases.
    """
    current = FORMER.get(owner, {}).get(name)
    current = FORMER_MODULES.get(f"{owner}.{name}") if current is None else f"{owner}.{current}"
    if current is None:
        raise AttributeError(f"{owner} has no attribute {name!r}", name=name)
    message = f"{owner}.{name} is now {current}: use the new name"
    caller = sys._getframe(2)  # noqa: SLF001 -- the only way to tell an import statement from getattr
    if caller.f_code.co_name == "_handle_fromlist":  # importlib's part of `from package import name`
        raise ImportError(message, name=owner)
    raise AttributeError(message, name=name)

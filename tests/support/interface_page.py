"""Make docs/interface.md, the table of functions and frameworks, from the `__all__` of the adapters.

`python tests/support/interface_page.py` writes the page. It reads the source, and imports no framework.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, PAGE = ROOT / "src" / "multiring", ROOT / "docs" / "interface.md"
TITLES = {
    "torch": "torch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "jax": "JAX",
    "chainer": "Chainer",
    "caffe": "Caffe",
}
# Functions that have a row even if one adapter alone exports them.
NAMED = (
    *("init", "is_initialized", "shutdown", "rank", "size", "local_rank", "local_size"),
    *("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"),
    *("broadcast_object", "allgather_object", "broadcast_parameters", "broadcast_variables", "distribute"),
    *("save", "load", "mean", "gather", "error_of"),
)
# The name that users of the framework know for the same thing: a function of the adapter; a method of Chainer's
# communicator `comm`; or a name of the framework's own.
OTHER = {
    ("broadcast_parameters", "tensorflow"): "broadcast_variables",
    ("broadcast_parameters", "keras"): "broadcast_variables",
    ("broadcast_parameters", "jax"): "broadcast",
    ("broadcast_parameters", "chainer"): "comm.bcast_data",
    ("broadcast_parameters", "caffe"): "distribute",
    ("broadcast_variables", "torch"): "broadcast_parameters",
    ("broadcast_variables", "jax"): "broadcast",
    ("broadcast_variables", "chainer"): "comm.bcast_data",
    ("broadcast_variables", "caffe"): "distribute",
    ("broadcast_global_variables", "torch"): "broadcast_parameters",
    ("broadcast_", "keras"): "broadcast_variables",
    ("grouped_allgather", "jax"): "allgather",
    ("grouped_allreduce", "jax"): "allreduce",
    ("grouped_reducescatter", "jax"): "reducescatter",
    ("save", "tensorflow"): "tf.train.Checkpoint",
    ("load", "tensorflow"): "tf.train.Checkpoint",
    ("save", "keras"): "model.save",
    ("load", "keras"): "load_model",
    ("save", "chainer"): "create_multi_node_checkpointer",
    ("load", "chainer"): "create_multi_node_checkpointer",
    ("save", "caffe"): "solver.snapshot",
    ("load", "caffe"): "solver.restore",
}
FRAMEWORKS_OWN = {"tf.train.Checkpoint", "model.save", "solver.snapshot", "solver.restore"}
# What a framework lacks, so that the function cannot exist.
LACKS = {
    ("broadcast_", "jax"): "JAX's arrays cannot be changed; `broadcast` returns a new one",
    ("broadcast_global_variables", "keras"): "Keras 3 has no global variables; the function says what to call instead",
    ("broadcast_global_variables", "jax"): "the framework has no global variables",
    ("broadcast_global_variables", "chainer"): "the framework has no global variables",
    ("broadcast_global_variables", "caffe"): "the framework has no global variables",
}
YES = "yes"
_HEAD = """# The interface of each framework

Look up which function of which adapter does what. An adapter is a module such as `multiring.torch`
or `multiring.jax`; its functions have Horovod's names. `yes` means that the adapter has the
function under this name. Another name is the function to call in that framework: a function of the
adapter, a method of Chainer's communicator `comm`, or the framework's own function. A number refers
to the reason, below the table, why the framework cannot have the function.

`python tests/support/interface_page.py` made this page from the adapters' `__all__`. A test
compares the page with the code. [frameworks.md](frameworks.md) shows the test results of each
adapter.

"""
_TAIL = """
## What is the same everywhere

| subject | in every adapter |
|---|---|
| the root of a broadcast | `root_rank`, a rank of the whole job |
| the type of floats between hosts | `compression`: a member of `Compression` (none, fp16, bf16, int8), or its name |
| the ranks that take part | `process_set`; by default all ranks |
| the operation of `allreduce` and `reducescatter` | `op`; by default the average |
| `distribute` | `distribute(what, ...)` returns `what`, ready for many ranks (see below) |
| the gradient of a broadcast | as in Horovod: all ranks' average on the root, zero on other ranks |
| a second `init` | returns at once with equal arguments or none; with others it raises an error that names them |
| a failed operation | raises a `multiring.errors.CollectiveError`; `error_of` finds it in a framework's error |

The arguments of `distribute` depend on the framework: a model, an optimizer and a loader in torch;
an optimizer or a tape in TensorFlow; a model in Keras; an optimizer in JAX and Chainer; a solver in
Caffe. In torch and Keras it always uses all ranks; the other frameworks also accept `process_set`.

Exceptions:

- `Group`, which has no framework, spells collectives with an underscore (`all_reduce`). It calls
  the root `root`, and the type between hosts `wire`.
- ChainerMN's communicators and functions keep ChainerMN's names and defaults: `comm.allreduce` sums,
  and the gradient of `functions.bcast` is the sum on the root.
- The gradients of JAX's `allgather` and `reducescatter` are their transposes. Those of torch and
  TensorFlow have Horovod's factors.
- Keras has Horovod's `compression` in `allreduce`, optimizers and `distribute`; its collectives take
  NumPy arrays and have no gradient.
- Horovod's queries such as `nccl_built` and `gloo_enabled` work in the adapters of torch, TensorFlow
  and Keras. They are not listed, because they say nothing about multiring.
"""


@cache
def exported(adapter: str) -> frozenset[str]:
    """Return the names in the `__all__` of an adapter."""
    return frozenset(ast.literal_eval(_assigned(adapter)))


def _assigned(adapter: str) -> ast.expr:
    tree = ast.parse((SOURCE / adapter / "__init__.py").read_text(encoding="utf-8"))
    return next(
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == "__all__"
    )


def _modules(adapter: str) -> set[str]:
    """Return the names of an adapter that are modules."""
    return {each.stem for each in (SOURCE / adapter).iterdir()}


def rows() -> list[str]:
    """Return the functions that have a row."""
    names = set(NAMED)
    for name in frozenset().union(*map(exported, TITLES)):
        owners = [adapter for adapter in TITLES if name in exported(adapter)]
        is_module = all(name in _modules(adapter) and name not in NAMED for adapter in owners)
        if len(owners) > 1 and name[0].islower() and not is_module and name != "global_process_set":
            names.add(name)
    return sorted(names)


def cell(row: str, adapter: str) -> str:
    """Return `yes`, another name, or the reason why the framework lacks the function.

    Raises:
        KeyError: the cell is neither filled nor explained.
    """
    key = row, adapter
    if key in LACKS:
        return LACKS[key]
    return YES if row in exported(adapter) else OTHER[key]


def page() -> str:
    """Return the text of docs/interface.md."""
    keys = [(row, adapter) for row in rows() for adapter in TITLES]
    reasons = list(dict.fromkeys(LACKS[key] for key in keys if key in LACKS))
    lines = ["| function | " + " | ".join(TITLES.values()) + " |", "|---" * (len(TITLES) + 1) + "|"]
    for row in rows():
        shown = [_shown(cell(row, adapter), reasons) for adapter in TITLES]
        lines.append(f"| `{row}` | " + " | ".join(shown) + " |")
    lines += ["", "Reasons:", "", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _shown(found: str, reasons: list[str]) -> str:
    if found in reasons:
        return str(reasons.index(found) + 1)
    return found if found == YES else f"`{found}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

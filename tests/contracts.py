"""Import rules between the packages of multiring, as import-linter's contracts: python tests/contracts.py [--draw].

LAYERS lists the packages that belong to no framework. Every other folder of multiring is the adapter of the framework
with its name, so a new adapter needs no change here.
"""

import ast
import sys
import tempfile
from pathlib import Path

from importlinter.cli import lint_imports

SOURCE = Path(__file__).parents[1] / "src" / "multiring"
ADAPTERS = "{adapters}"
# From top to bottom: each package imports only packages below it. Packages on one line are independent.
LAYERS = (
    "_cli",
    "vision",
    "training",
    "horovod | lab | trials | _bench | _diagnosis | _manifests | _verify",
    "dask | ray | spark",
    "_launch",
    ADAPTERS,
    "adapters",
    "_gradients",
    "_frontend | _probe | data",
    "convergence",
    "_runtime",
    "_exchanges",
    "_simulator",
    "planner",
    "_collectives | _agreement | trace",
    "_schedule",
    "_topology",
    "_native",
    "_settings",
    "_foreign_variables | _setting_values | _replacing | _file_locks | _strict_json | optim | frontend | gradients",
    "_arguments | _first_use | _limits | _steps | _web",
    "errors | _forks | _former_names | _version",
)
# The order of the parts of one package, from the top, as in LAYERS.
PARTS = {
    "data": (
        "balance | packing",
        "feeding",
        "array_dataset | dataset",
        "sample_maker",
        "peers | stages",
        "augment | caching | decoding",
        "readers",
        "elastic_order | progress",
        "eviction",
        "eviction_search | orders",
        "jpeg | permutation | shares",
    ),
    "vision": (
        "labelling | serving",
        "predicting",
        "exporting",
        "scoring",
        "fitting",
        "models",
        "checks | formats",
        "project",
        "duplicates | pictures",
        "outlines | signatures | splits",
        "labels",
        "run_lengths",
    ),
}
BUILDS_ON_OTHERS = "keras"  # a Keras model runs on one of the other frameworks
# Packages above the adapters that are built on torch. Another such package needs a place in LAYERS, above the packages
# that it imports, and its name here.
BUILD_ON_TORCH = ("training", "vision", "_verify")
ESTIMATORS = "spark"  # its estimators train models of torch and of Keras, which runs on one of the others
# The packages that start ranks on a cluster. Each is the only importer of its cluster's framework.
CLUSTERS = {"dask": ("dask", "distributed"), "ray": ("ray",), "spark": ("pyspark",)}
# torchrun's store is torch's: the one module below the adapters that may import it, once the store is used.
OF_TORCHRUN = "multiring._exchanges.torch_store"
# Commands import these modules once they need them; no command imports torch itself.
OF_COMMANDS = "multiring._cli.* -> multiring.vision.**"
# Workers of `bench` and `verify` are programs of their own; no module imports them.
WORKERS = ("multiring._bench.workers.*", "multiring._verify.workers.*")


def rooms() -> set[str]:
    """Return the names of the packages and modules directly in multiring."""
    return {
        each.stem
        for each in SOURCE.iterdir()
        if (each / "__init__.py").exists() or (each.suffix == ".py" and not each.stem.startswith("__"))
    }


def adapters() -> list[str]:
    """Return the frameworks that have an adapter."""
    known = {room for layer in LAYERS for room in layer.split(" | ")}
    return sorted(rooms() - known)


def contracts() -> str:
    """Return import-linter's configuration."""
    frameworks = adapters()
    layers = []
    for layer in LAYERS:
        if layer != ADAPTERS:
            layers.append(layer)
            continue
        layers += [BUILDS_ON_OTHERS] * (BUILDS_ON_OTHERS in frameworks)
        layers.append(" | ".join(each for each in frameworks if each != BUILDS_ON_OTHERS))
    text = [
        "[importlinter]",
        "root_package = multiring",
        "include_external_packages = True",
        _contract("direction", "Each room calls only the rooms below it", "layers"),
        _lines("containers", ["multiring"]),
        "exhaustive = True",
        _lines("exhaustive_ignores", ["__main__"]),
        _lines("layers", layers),
        # `_native` imports its compiled `_core`. import-linter cannot see `_core` and reports an import of the
        # package instead.
        _lines("ignore_imports", ["multiring._native -> multiring"]),
    ]
    for room, parts in PARTS.items():
        text += [
            _contract(f"parts-of-{room}", f"Each part of {room} calls only the parts below it", "layers"),
            _lines("containers", [f"multiring.{room}"]),
            "exhaustive = True",
            _lines("layers", list(parts)),
        ]
    for framework in frameworks:
        allowed = {framework, BUILDS_ON_OTHERS, ESTIMATORS, *(BUILD_ON_TORCH if framework == "torch" else ())}
        others = sorted(rooms() - allowed)
        text += [
            _contract(framework, f"{framework} is imported by its adapter only", "forbidden"),
            _lines("source_modules", [f"multiring.{room}" for room in others]),
            _lines("forbidden_modules", [framework]),
            _lines(
                "ignore_imports",
                [
                    *_by_workers(framework, f"multiring.{framework}", f"multiring.{framework}.*"),
                    *([f"{OF_TORCHRUN} -> torch", OF_COMMANDS] if framework == "torch" else []),
                ],
            ),
            "unmatched_ignore_imports_alerting = none",
        ]
    for room, packages in CLUSTERS.items():
        text += [
            _contract(f"cluster-{room}", f"{', '.join(packages)}: imported by multiring.{room} only", "forbidden"),
            _lines("source_modules", [f"multiring.{other}" for other in sorted(rooms() - {room})]),
            _lines("forbidden_modules", list(packages)),
            "allow_indirect_imports = True",
        ]
    text += [
        _contract("mpi", "mpi4py is imported where runtime needs it only", "forbidden"),
        _lines("source_modules", [f"multiring.{room}" for room in sorted(rooms() - {"_runtime"})]),
        _lines("forbidden_modules", ["mpi4py"]),
        _lines("ignore_imports", _by_workers("mpi4py")),
        "unmatched_ignore_imports_alerting = none",
        "allow_indirect_imports = True",
        _contract("agreement", "The agreement stands alone", "forbidden"),
        _lines("source_modules", ["multiring._agreement"]),
        _lines(
            "forbidden_modules",
            ["ml_dtypes", "numpy", *(f"multiring.{room}" for room in sorted(rooms() - {"_agreement"}))],
        ),
    ]
    return "\n".join(text) + "\n"


def _by_workers(*modules: str) -> list[str]:
    return [f"{worker} -> {module}" for worker in WORKERS for module in modules]


def _contract(number: str, name: str, kind: str) -> str:
    return f"\n[importlinter:contract:{number}]\nname = {name}\ntype = {kind}"


def _lines(name: str, values: list[str]) -> str:
    return "\n    ".join([f"{name} =", *values])


def drawing() -> str:
    """Return the packages from top to bottom, each with the first line of its docstring."""
    lines = []
    for layer in LAYERS:
        shown = adapters() if layer == ADAPTERS else layer.split(" | ")
        lines += [f"{room:<14} {_said_by(room)}" for room in shown] + [""]
    return "\n".join(lines).rstrip()


def _said_by(room: str) -> str:
    file = SOURCE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else SOURCE / f"{room}.py").read_text("utf-8"))) or ""
    return text.split("\n")[0]


if __name__ == "__main__" and "--draw" in sys.argv:
    print(drawing())  # noqa: T201 -- a command
elif __name__ == "__main__":
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(contracts())
        file.flush()
        sys.exit(lint_imports(config_filename=file.name, no_logo=True))

"""Compare multiring's signatures with those of Horovod 0.28.1's sdist.

Read Horovod's signatures again (pip download horovod==0.28.1 --no-deps --no-binary :all:), or compare those of the
installed modules:

    python tests/support/horovod_signatures.py read horovod-0.28.1.tar.gz
    multiring run --horovod -n 1 -- python tests/support/horovod_signatures.py compare

The script reads only names, kinds and defaults of parameters: facts of the interface, and no code.
"""

import ast
import hashlib
import inspect
import json
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("horovod_signatures.json")
MODULES = (
    "horovod.common.basics",
    "horovod.common.elastic",
    "horovod.common.exceptions",
    "horovod.common.process_sets",
    "horovod.common.util",
    "horovod.runner",
    "horovod.runner.common.util.env",
    "horovod.runner.util.threads",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
    "horovod.tensorflow",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.functions",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm",
    "horovod.torch",
    "horovod.torch.compression",
    "horovod.torch.elastic",
    "horovod.torch.elastic.sampler",
    "horovod.torch.elastic.state",
    "horovod.torch.functions",
    "horovod.torch.mpi_ops",
    "horovod.torch.optimizer",
    "horovod.torch.sync_batch_norm",
)
# The names that these packages import from Horovod's modules are public, too.
PACKAGES = (
    *("horovod.keras", "horovod.runner", "horovod.tensorflow", "horovod.tensorflow.keras"),
    *("horovod.torch", "horovod.torch.elastic"),
)
# Users call methods of these private classes on the optimizers that DistributedOptimizer returns.
OPTIMIZERS = ("_DistributedOptimizer", "_DistributedAdasumOptimizer")
ADAPTERS = ("horovod.torch", "horovod.tensorflow", "horovod.keras")
Parameter = dict[str, str]  # the name, the kind, and the text of the default, if any


# -- reading Horovod's signatures


def read(sdist: Path) -> dict[str, Any]:
    """Return the table: functions by dotted name, and the public names of each module."""
    functions: dict[str, list[Parameter]] = {}
    names: dict[str, list[str]] = {}
    with tarfile.open(sdist) as archive:
        root = archive.getnames()[0].partition("/")[0]
        for module in MODULES:
            tree = ast.parse(source_of(archive, f"{root}/{module.replace('.', '/')}"))
            functions |= {f"{module}.{name}": parameters for name, parameters in functions_in(tree)}
            names[module] = sorted(set(names_in(tree.body, is_package=module in PACKAGES)))
    for alias, of in aliases(functions, names):
        functions[alias] = functions[of]
    return {
        "source": {"file": sdist.name, "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest()},
        "functions": dict(sorted(functions.items())),
        "names": names,
    }


def source_of(archive: tarfile.TarFile, path: str) -> str:
    """Return the source of a module in the archive."""
    known = set(archive.getnames())
    file = archive.extractfile(f"{path}.py" if f"{path}.py" in known else f"{path}/__init__.py")
    assert file is not None
    return file.read().decode()


def functions_in(tree: ast.Module) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield the public functions, methods and constructors, except autograd's classes."""
    for node in statements_in(tree.body):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, parameters_of(node)
        elif isinstance(node, ast.ClassDef) and is_offered(node):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and is_public_method(method, node.name):
                    bound = 0 if "staticmethod" in map(ast.unparse, method.decorator_list) else 1
                    yield f"{node.name}.{method.name}", parameters_of(method)[bound:]


def statements_in(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those inside `if` statements."""
    for node in body:
        yield from statements_in(node.body) if isinstance(node, ast.If) else (node,)


def is_offered(node: ast.ClassDef) -> bool:
    """Return whether users use the class: it is public or an optimizer's class."""
    is_autograds = any(ast.unparse(base).endswith("Function") for base in node.bases)
    return not is_autograds and (not node.name.startswith("_") or node.name in OPTIMIZERS)


def is_public_method(method: ast.FunctionDef, owner: str) -> bool:
    """Return whether users call the method. They do not construct private classes."""
    return not method.name.startswith("_") or (method.name == "__init__" and not owner.startswith("_"))


def parameters_of(node: ast.FunctionDef) -> list[Parameter]:
    """Return a function's parameters in order."""
    arguments = node.args
    plain: list[tuple[ast.arg, Any]] = [(each, inspect.Parameter.POSITIONAL_ONLY) for each in arguments.posonlyargs]
    plain += [(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = [described(each.arg, kind, default) for (each, kind), default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        found.append(described(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(described(each.arg, inspect.Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg:
        found.append(described(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return found


def described(name: str, kind: Any, default: ast.expr | None = None) -> Parameter:
    """Return a parameter in the table's form."""
    return {"name": name, "kind": kind.name} | ({} if default is None else {"default": ast.unparse(default)})


def names_in(body: list[ast.stmt], *, is_package: bool) -> Iterator[str]:
    """Yield the public names that a module defines.

    A package also yields the names that it imports from Horovod. `size = _basics.size` is yielded as
    "size=_basics.size", because the name has the method's signature.
    """
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if is_offered(node):
                yield node.name
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.If):
            yield from names_in(node.body, is_package=is_package)
        elif isinstance(node, ast.ImportFrom) and is_package and (node.module or "").startswith("horovod"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from assigned_in(node)


def assigned_in(node: ast.Assign) -> Iterator[str]:
    """Yield the public names of an assignment, in the form of `names_in`."""
    text = ast.unparse(node.value)
    for target in node.targets:
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            yield f"{target.id}={text}" if text.startswith("_basics.") else target.id


def aliases(functions: dict[str, Any], names: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield (name, method) for each name that a module takes from HorovodBasics.

    In `names`, the entry "name=value" of such a name is replaced by the name alone.
    """
    for module, found in names.items():
        for text in [text for text in found if "=" in text]:
            name, _, value = text.partition("=")
            found[found.index(text)] = name
            method = f"horovod.common.basics.HorovodBasics.{value.removeprefix('_basics.')}"
            if method in functions:
                yield f"{module}.{name}", method


# -- comparing multiring's signatures


def compare(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the differences of multiring's signatures from the table.

    Returns:
        "missing" gives the error for each missing name, "added" the parameters that each function has in addition, and
        "differs" a description of each other difference.
    """
    missing: dict[str, str] = {}
    added: dict[str, list[str]] = {}
    differs: dict[str, str] = {}
    for name, theirs in table["functions"].items():
        try:
            ours = list(signature_of(name).parameters.values())
        except AttributeError as error:
            missing[name] = str(error)
            continue
        # New parameters may also come before a final *args or **kwargs.
        has_tail = bool(theirs and ours) and theirs[-1] == {"name": ours[-1].name, "kind": ours[-1].kind.name}
        count = len(theirs) - has_tail
        difference = difference_of(theirs[:count], ours[: len(ours) - has_tail])
        if difference:
            differs[name] = f"{difference}; ours is ({', '.join(map(str, ours))})"
        elif len(ours) > len(theirs):
            added[name] = [each.name for each in ours[count : len(ours) - has_tail]]
    for module, names in table["names"].items():
        absent = [name for name in names if not hasattr(import_module(module), name)]
        missing |= {f"{module}.{name}": "no such name" for name in absent if f"{module}.{name}" not in missing}
    return {"missing": missing, "added": added, "differs": differs}


def signature_of(name: str) -> inspect.Signature:
    """Return multiring's signature of a name, without self.

    Raises:
        AttributeError: multiring has no such name.
    """
    module = next(module for module in sorted(MODULES, key=len, reverse=True) if name.startswith(f"{module}."))
    found: Any = import_module(module)
    *owners, last = name.removeprefix(f"{module}.").split(".")
    for owner in owners:
        found = optimizer_class(name) if owner in OPTIMIZERS else getattr(found, owner)
    if last == "__init__":
        return inspect.signature(found)
    signature = inspect.signature(getattr(found, last))
    is_method = inspect.isclass(found) and not isinstance(
        inspect.getattr_static(found, last), (staticmethod, classmethod)
    )
    return signature.replace(parameters=list(signature.parameters.values())[1:]) if is_method else signature


def optimizer_class(name: str) -> type:
    """Return the class of the optimizers that DistributedOptimizer returns."""
    if name.startswith("horovod.tensorflow."):
        import horovod.tensorflow as hvt  # noqa: PLC0415 -- exists only in ranks of `multiring run --horovod`
        import tensorflow as tf  # noqa: PLC0415 -- as above

        hvt.init()
        return type(hvt.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1)))
    import horovod.torch as hvd  # noqa: PLC0415 -- exists only in ranks of `multiring run --horovod`
    import torch  # noqa: PLC0415 -- as above

    hvd.init()
    weight = torch.nn.Parameter(torch.ones(2))
    op = hvd.Adasum if "Adasum" in name else hvd.Average
    return type(hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], op=op))


def difference_of(theirs: list[Parameter], ours: list[inspect.Parameter]) -> str:
    """Return how `ours` differs from `theirs`.

    The result is "" if `ours` only adds optional parameters.
    """
    for index, parameter in enumerate(theirs):
        if index >= len(ours):
            return f"lacks {parameter['name']}"
        own = ours[index]
        if (own.name, own.kind.name) != (parameter["name"], parameter["kind"]):
            return f"parameter {index + 1} is {own.name} ({own.kind.name}), theirs {parameter}"
        if ("default" in parameter) != (own.default is not inspect.Parameter.empty):
            return f"{own.name} has {'no' if 'default' in parameter else 'a'} default"
        if "default" in parameter and not is_default(own.default, parameter["default"]):
            return f"{own.name} defaults to {own.default!r}, theirs to {parameter['default']}"
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for own in ours[len(theirs) :]:
        if own.default is inspect.Parameter.empty and own.kind not in variable:
            return f"{own.name} is not optional"
    return ""


def is_default(value: Any, text: str) -> bool:
    """Return whether `value` equals `text`, a literal or a name in an adapter."""
    try:
        wanted = ast.literal_eval(text)
    except ValueError:
        return any(is_named(value, text, adapter) for adapter in ADAPTERS)
    return type(value) is type(wanted) and bool(value == wanted)


def is_named(value: Any, text: str, adapter: str) -> bool:
    """Return whether `text` names `value` in an adapter."""
    wanted: Any = import_module(adapter)
    for part in text.split("."):
        wanted = getattr(wanted, part, None)
    return value is wanted or bool(value == wanted)


def main(arguments: list[str]) -> None:
    """Read Horovod's signatures, or print the differences as JSON."""
    if arguments[:1] == ["read"]:
        table = read(Path(arguments[1]))
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        sys.stdout.write(f"{len(table['functions'])} signatures\n")
    elif arguments == ["compare"]:
        sys.stdout.write(json.dumps(compare(json.loads(TABLE.read_text()))) + "\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

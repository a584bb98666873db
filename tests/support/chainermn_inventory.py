"""Record ChainerMN's public interface from Chainer's sdist.

Usage: `python chainermn_inventory.py chainer-7.8.1.tar.gz`. The script parses the sources with ast. It writes
chainermn_interface.json beside this file: the exports of each package, the parameters of its functions and
constructors, and the methods of a communicator. It omits chainermn.testing, which serves ChainerMN's own tests.
"""

import ast
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

PACKAGES = ("", "communicators", "datasets", "extensions", "functions", "iterators", "links")
MODULES = ("global_except_hook", "nccl", "optimizers")
OUTPUT = Path(__file__).with_name("chainermn_interface.json")


def sources(path: str) -> dict[str, ast.Module]:
    """Return ChainerMN's parsed modules by name."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            file = archive.extractfile(member) if name.startswith("chainermn/") and name.endswith(".py") else None
            if file:
                dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                found[dotted] = ast.parse(file.read())
    return found


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return a function's parameters without self; a star marks keyword-only ones."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if names[:1] == ["self"] else names
    return names + [f"*{each.arg}" for each in arguments.kwonlyargs]


def defined(module: ast.Module) -> dict[str, Any]:
    """Return a module's public functions and classes, with their parameters."""
    found: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            found[node.name] = parameters(inits[0]) if inits else []
    return found


def _defined_in(modules: dict[str, ast.Module], name: str) -> dict[str, Any]:
    return defined(modules[name])


def exported(modules: dict[str, ast.Module], name: str) -> dict[str, Any]:
    """Return the names that a package defines or imports from ChainerMN."""
    found = defined(modules[name])
    for node in modules[name].body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chainermn"):
            for alias in node.names:
                origin = modules.get(f"{node.module}.{alias.name}")
                if origin is None:
                    is_package = (node.module or "").removeprefix("chainermn").lstrip(".") in PACKAGES
                    held = (exported if is_package else _defined_in)(modules, node.module or "")
                    found[alias.asname or alias.name] = held.get(alias.name, [])
                else:
                    found[alias.name] = "module"
    return found


def inventory(path: str) -> dict[str, Any]:
    """Return the interface of all packages and modules."""
    modules = sources(path)
    found: dict[str, Any] = {}
    for name in PACKAGES:
        dotted = f"chainermn.{name}".rstrip(".")
        found[dotted] = exported(modules, dotted)
    for name in MODULES:
        found[f"chainermn.{name}"] = defined(modules[f"chainermn.{name}"])
    base = modules["chainermn.communicators.communicator_base"]
    kind = next(node for node in base.body if isinstance(node, ast.ClassDef))
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    found["CommunicatorBase"] = {
        node.name: "property"
        if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
        else parameters(node)
        for node in methods
    }
    return found


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(inventory(sys.argv[1]), indent=1, sort_keys=True) + "\n", encoding="utf-8")

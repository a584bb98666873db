"""The functions of `horovod.common.util` that report compiled features.

multiring has one core for all frameworks and compiles nothing against a framework. So an adapter is available if its
framework is installed.
"""

import importlib.util
import sysconfig
from importlib import import_module
from pathlib import Path

from multiring._frontend import build_questions

ADAPTERS = ("torch", "tensorflow")  # frameworks with an adapter, by Horovod's names


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 -- Horovod's signature
    """Return whether `horovod.<ext_base_name>` can be imported."""
    return ext_base_name in ADAPTERS and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 -- Horovod's signature
    """Return False, because multiring compiles nothing for GPUs. `multiring.torch` takes CUDA tensors all the same."""
    return False


def mpi_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return False, or None if no framework is installed.

    The result is False because `horovod.run` does not support MPI (`use_mpi`).

    In contrast, `horovod.torch.mpi_built()` returns whether MPI could carry bytes.
    """
    return None if _framework() is None else False


def gloo_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return `horovod.torch.gloo_built()`, or None if no framework is installed."""
    return _asked("gloo_built")


def nccl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return `horovod.torch.nccl_built() != 0`, or None without a framework."""
    return _asked("nccl_built")


def ddl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return the result of `horovod.torch.ddl_built()`, or None without any framework."""
    return _asked("ddl_built")


def ccl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return the result of `horovod.torch.ccl_built()`, or None without any framework."""
    return _asked("ccl_built")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001 -- Horovod's signature
    """Check that the module `ext_name`, such as horovod.torch, can be imported.

    Raises:
        ImportError: the module cannot be imported.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not available: multiring has adapters for {', '.join(ADAPTERS)}")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing, because the adapters accept any version of a framework.

    They are not compiled against a framework.
    """


def get_ext_suffix() -> str:
    """Return the file suffix of this Python's compiled modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path that a compiled module of the package at `pkg_path` would have."""
    *folders, name = args
    return str(Path(pkg_path).parent.joinpath(*folders, name + get_ext_suffix()))


def _framework() -> str | None:
    return next((name for name in ADAPTERS if extension_available(name)), None)


def _asked(query: str) -> bool | None:
    framework = _framework()
    return None if framework is None else bool(getattr(build_questions, query)())


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is at least `target`, which is like 1.2.3.

    Needs the package `packaging`.

    Raises:
        ValueError: an argument is not a string, or `target` does not have three parts.
    """
    if not all(isinstance(version, str) for version in (ver, target)):
        raise ValueError(f"ver={ver!r} and target={target!r}: want strings")
    if target.count(".") != 2:
        raise ValueError(f"target={target!r}: want major.minor.patch")
    parse = import_module("packaging.version").parse
    return bool(parse(ver) >= parse(target))

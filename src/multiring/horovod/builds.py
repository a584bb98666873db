"""What was built into this Horovod: what `horovod.common.util` answers where it would look into compiled extensions.

multiring has one core for all frameworks, and none of it is compiled against a framework: an adapter is there where
its framework is.
"""

import importlib.util
import sysconfig
from importlib import import_module
from pathlib import Path

from multiring.frontend import lifecycle

ADAPTERS = ("torch", "tensorflow")  # Horovod's names of the frameworks that have one


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 -- Horovod's signature
    """Return whether `horovod.<ext_base_name>` can be imported."""
    return ext_base_name in ADAPTERS and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 -- Horovod's signature
    """Return False: multiring moves host memory."""
    return False


def mpi_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return False, as `horovod.run` has no way with MPI (`use_mpi`); None without any framework.

    `horovod.torch.mpi_built()` says something else: whether MPI could carry bytes.
    """
    return None if _framework() is None else False


def gloo_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return what `horovod.torch.gloo_built()` does; None without any framework."""
    return _asked("gloo_built")


def nccl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return whether `horovod.torch.nccl_built()` is not 0; None without any framework."""
    return _asked("nccl_built")


def ddl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return what `horovod.torch.ddl_built()` does; None without any framework."""
    return _asked("ddl_built")


def ccl_built(verbose: bool = False) -> bool | None:  # noqa: ARG001 -- Horovod's signature
    """Return what `horovod.torch.ccl_built()` does; None without any framework."""
    return _asked("ccl_built")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001 -- Horovod's signature
    """Raise unless the module `ext_name`, such as horovod.torch, is there.

    Raises:
        ImportError: it is not.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not there: multiring has adapters for {', '.join(ADAPTERS)}")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: the adapters are not compiled against a framework, so that any version of it will do."""


def get_ext_suffix() -> str:
    """Return the ending of this Python's compiled modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where a compiled module of the package at `pkg_path` would be."""
    *folders, name = args
    return str(Path(pkg_path).parent.joinpath(*folders, name + get_ext_suffix()))


def _framework() -> str | None:
    return next((name for name in ADAPTERS if extension_available(name)), None)


def _asked(query: str) -> bool | None:
    framework = _framework()
    return None if framework is None else bool(getattr(lifecycle, query)())


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version `ver` is `target`, which is like 1.2.3, or a later one; needs packaging.

    Raises:
        ValueError: one is no text, or `target` has not three parts.
    """
    if not all(isinstance(version, str) for version in (ver, target)):
        raise ValueError(f"ver={ver!r} and target={target!r}: want texts")
    if target.count(".") != 2:
        raise ValueError(f"target={target!r}: want major.minor.patch")
    parse = import_module("packaging.version").parse
    return bool(parse(ver) >= parse(target))

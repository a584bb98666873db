"""Compile the stand-ins of CUDA and NCCL, once for each state of their sources.

The functions are declared as multiring declares them, in the tables of signatures that its ctypes calls use. A stand-in
with other parameters does not compile. No file of NVIDIA is needed.
"""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.standin.runtime_signatures import DRIVER_OF_JAX, RUNTIME_SIGNATURES, RUNTIME_TEXTS

from multiring._runtime.engines.cuda_driver import CUDA_SIGNATURES
from multiring._runtime.engines.nccl_library import NCCL_SIGNATURES, NCCL_TEXTS
from multiring._runtime.engines.nvml import NVML, NVML_SIGNATURES

HERE = Path(__file__).parent
BASE = "libstandin.so"  # the others use it
LIBRARIES = {
    BASE: ("memory.cc", "stream.cc", "capture.cc", "runtime.cc"),
    "libcudart.so.13": ("cudart.cc",),
    "libcuda.so.1": ("cuda.cc",),
    "libnccl.so.2": ("board.cc", "communicator.cc", "reduction.cc", "nccl.cc"),
}
MANAGEMENT = "nvml.cc"  # not one of the libraries above: no process has it unless a test says so
NVML_OPTIONS = ("-shared", f"-Wl,-soname,{NVML}")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{HERE}")
_NAMES = {
    ctypes.c_int: "int",
    ctypes.c_uint: "unsigned",
    ctypes.c_long: "long",
    ctypes.c_ulong: "unsigned long",  # size_t and uint64_t
    ctypes.c_float: "float",
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "const char*",
}


@cache
def built() -> Path:
    """Return the folder of the compiled stand-ins; compile them if no earlier run has.

    In the environment of `make test-cuda`, it is the folder of those that serve torch too.
    """
    if "STANDIN_LIBRARIES" in os.environ:
        return Path(os.environ["STANDIN_LIBRARIES"])
    return made_once(HERE.parents[1] / "build" / "standin", state_of([declarations()], "*.cc", "*.h"), _compile)


@cache
def nvml_built() -> Path:
    """Return the compiled stand-in of NVML. A process finds it by this path, or by LD_LIBRARY_PATH of its folder.

    A process that has loaded it with RTLD_GLOBAL finds it by its name, too.
    """
    state = state_of([declarations(NVML_SIGNATURES), *NVML_OPTIONS], MANAGEMENT)
    return made_once(HERE.parents[1] / "build" / "standin-nvml", state, _compile_nvml) / NVML


def _compile_nvml(folder: Path) -> None:
    (folder / "declarations.h").write_text(declarations(NVML_SIGNATURES), encoding="utf-8")
    run_compiler(*FLAGS, f"-I{folder}", str(HERE / MANAGEMENT), *NVML_OPTIONS, "-o", str(folder / NVML))


def state_of(texts: list[str], *patterns: str) -> str:
    """Return a name for the state of texts and of this folder's files."""
    sources = sorted({each for pattern in patterns for each in HERE.glob(pattern)})
    texts = [*texts, *(each.read_text("utf-8") for each in sources)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def made_once(top: Path, name: str, make: Callable[[Path], None], kept: int = 1) -> Path:
    """Return the folder `name` of `top`, which `make` fills if it is not there.

    Only the `kept` latest folders stay.
    """
    top.mkdir(parents=True, exist_ok=True)
    folder = top / name
    with (top / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            others = sorted(top.glob("[!.]*/"), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in others[kept - 1 :]:
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=top, prefix=".new-") as new:
                work = Path(new) / "made"
                work.mkdir()
                make(work)
                work.rename(folder)
        folder.touch()
    return folder


def _compile(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write_sources(Path(scratch))

        def build(library: str) -> None:
            run_compiler(*FLAGS, f"-I{scratch}", f"{scratch}/{library}.cc", *linking(folder, library))

        build(BASE)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(build, [each for each in LIBRARIES if each != BASE]))


def write_sources(scratch: Path) -> None:
    """Write the declarations, and one file for each library, because that compiles in half the time."""
    (scratch / "declarations.h").write_text(declarations(), encoding="utf-8")
    for library, sources in LIBRARIES.items():
        text = "".join(f'#include "{each}"\n' for each in sources)
        (scratch / f"{library}.cc").write_text(text, encoding="utf-8")


def linking(folder: Path, library: str) -> list[str]:
    """Return the options that link a library in `folder`."""
    below = [] if library == BASE else [str(folder / BASE), "-Wl,-rpath,$ORIGIN"]
    return [*below, "-shared", f"-Wl,-soname,{library}", "-Wl,--no-undefined", "-o", str(folder / library)]


def run_compiler(*options: str) -> None:
    """Run the C++ compiler.

    Raises:
        AssertionError: it fails. The text has its messages.
    """
    command = [*shlex.split(os.environ.get("CXX", "c++")), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{shlex.join(command)}\n{done.stderr}")


def declarations(*tables: dict[str, list[Any]]) -> str:
    """Return a C++ header that declares the functions of `tables`; by default, of all libraries but NVML."""
    lines = ["#pragma once", "#include <cstddef>", "#include <cstdint>", 'extern "C" {']
    known: set[type] = set()
    functions = []
    codes = tables or (RUNTIME_SIGNATURES, CUDA_SIGNATURES, DRIVER_OF_JAX, NCCL_SIGNATURES)
    for kind, chosen in (("int", codes), ("const char*", () if tables else (RUNTIME_TEXTS, NCCL_TEXTS))):
        for name, parameters in (pair for table in chosen for pair in table.items()):
            names = [_name_of(each, known, lines) for each in parameters]
            functions.append(f"{kind} {name}({', '.join(names)});")
    return "\n".join([*lines, *functions, "}", ""])


def _name_of(kind: Any, known: set[type], lines: list[str]) -> str:
    """Return the C++ name of a ctypes type; declare the structures that it needs."""
    if kind in _NAMES:
        return _NAMES[kind]
    if issubclass(kind, ctypes.Structure):
        name: str = kind.__name__
        if kind not in known:
            known.add(kind)
            lines.append(f"struct {name} {{ {' '.join(_field(*each[:2]) for each in kind._fields_)} }};")
        return name
    return _name_of(kind._type_, known, lines) + "*"


def _field(name: str, kind: Any) -> str:
    if issubclass(kind, ctypes.Array):
        assert kind._type_ is ctypes.c_byte, kind
        return f"signed char {name}[{kind._length_}];"
    return f"{_NAMES[kind]} {name};"

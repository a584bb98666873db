"""Compile the stand-ins for torch's CUDA build, in the environment of `make test-cuda`.

`python -m tests.standin.torch_build` prints the settings with which a program must be started, for a shell.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.standin.build import (
    BASE,
    FLAGS,
    HERE,
    LIBRARIES,
    declarations,
    linking,
    made_once,
    run_compiler,
    state_of,
    write_sources,
)

SITE = Path(sysconfig.get_path("purelib"))
HEADERS = ("nvidia/cu13/include", "nvidia/nccl/include")
# What torch needs beyond the functions that multiring calls. These files include NVIDIA's headers.
MORE = {"libcudart.so.13": "cudart_torch.cc", "libcuda.so.1": "cuda_torch.cc"}
OPERATORS = "libstandin_torch.so"
MEMORY_MB = 2048
_KEPT = 8  # states of the sources, because several checkouts share an environment
_LOOSE = re.compile(r"cu(blas|dnn|fft|rand|sparse|solver|pti|File)|nv(rtc|shmem|JitLink)")
_REFUSALS = {"libnccl.so.2": 3}  # ncclInternalError; for others, cudaErrorNotSupported


def torch_built() -> tuple[Path, Path]:
    """Return the folder of the libraries, and torch's operators; compile them if no earlier run has."""
    top = Path(sys.prefix) / "standin"
    version = (SITE / "torch" / "version.py").read_text("utf-8")
    here = Path(__file__).read_text("utf-8")
    libraries = made_once(
        top / "libraries", state_of([declarations(), version, here], "*.cc", "*.h"), _compile_libraries, _KEPT
    )
    operators = made_once(top / "operators", state_of([version, here], "torch_operators.cc"), _compile_operators, _KEPT)
    return libraries, operators / OPERATORS


def environment() -> dict[str, str]:
    """Return the variables with which torch's CUDA build starts on the stand-ins."""
    libraries, operators = torch_built()
    code = (SITE / HEADERS[1] / "nccl.h").read_text("utf-8")
    major, minor, patch = (
        int(re.findall(rf"define NCCL_{each} (\d+)", code)[0]) for each in ("MAJOR", "MINOR", "PATCH")
    )
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_PRELOAD": ":".join(str(libraries / each) for each in LIBRARIES),
        "LD_LIBRARY_PATH": str(libraries / "empty") + (f":{before}" if before else ""),
        "STANDIN_LIBRARIES": str(libraries),
        "STANDIN_OPERATORS": str(operators),
        "STANDIN_MEMORY_MB": os.environ.get("STANDIN_MEMORY_MB", str(MEMORY_MB)),
        "STANDIN_NCCL": os.environ.get("STANDIN_NCCL", str(major * 10000 + minor * 100 + patch)),
    }


def _compile_libraries(folder: Path) -> None:
    wanted = _wanted()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        scratch = Path(name)
        write_sources(scratch)
        run_compiler(*FLAGS, f"-I{scratch}", str(scratch / f"{BASE}.cc"), *linking(folder, BASE))

        def build(library: str) -> None:
            objects = [scratch / f"{library}.o"]
            run_compiler(*FLAGS, f"-I{scratch}", "-c", f"{scratch}/{library}.cc", "-o", str(objects[0]))
            if library in MORE:
                objects.append(scratch / f"{library}-torch.o")
                run_compiler(*FLAGS, *_includes(), "-c", str(HERE / MORE[library]), "-o", str(objects[1]))
            imports = wanted.pop(library)
            imports.names -= {name for each in objects for name in _defined(each)}
            _link(folder / library, imports, [*map(str, objects), *linking(folder, library)])

        list(pool.map(build, [each for each in LIBRARIES if each != BASE]))
        (folder / "empty").mkdir()
        for library, imports in wanted.items():
            _link(folder / "empty" / library, imports, ["-shared", f"-Wl,-soname,{library}"])


def _link(path: Path, missing: "_Imports", options: list[str]) -> None:
    """Link a library with functions that say that they are missing."""
    with tempfile.TemporaryDirectory() as name:
        code = _REFUSALS.get(path.name, 801)
        body = "".join(
            f'int {each}() {{ return standin_missing("{each}", {code}); }}\n' for each in sorted(missing.names)
        )
        source, versions = Path(name) / "missing.cc", Path(name) / "versions"
        source.write_text(f'extern "C" {{\nint standin_missing(const char*, int);\n{body}}}\n', encoding="utf-8")
        versions.write_text(f"{missing.version} {{ global: *; }};\n", encoding="utf-8")
        run_compiler("-fPIC", str(source), *options, f"-Wl,--version-script={versions}", "-o", str(path))


@dataclass
class _Imports:
    """What torch's libraries import of one library: the version, and the functions."""

    version: str
    names: set[str] = field(default_factory=set)


def _wanted() -> dict[str, _Imports]:
    """Return what torch's libraries import of each library of NVIDIA."""
    found: dict[str, _Imports] = {}
    loose: set[str] = set()
    for path in sorted((SITE / "torch" / "lib").glob("*.so")):
        text = _said("objdump", "-p", path)
        for library in re.findall(r"NEEDED\s+(lib(?:cu|nccl|nv)\S+)", text):
            found.setdefault(library, _Imports(library))
        homes = dict(re.findall(r"required from (\S+):\n\s+0x\S+ 0x\S+ \d+ (\S+)\n", text))
        for library in homes.keys() & found.keys():
            found[library].version = homes[library]
        libraries = {version: library for library, version in homes.items()}
        for version, name in re.findall(r"\*UND\*\s+\w+ +(\S+) +(\S+)$", _said("objdump", "-T", path), re.MULTILINE):
            library = libraries.get(version.strip("()"), "")
            (found[library].names if library in found else loose).add(name)
    found["libnccl.so.2"].names |= {each for each in loose if each.startswith("nccl")}
    others = {each for each in loose if _LOOSE.match(each)}
    found["libcuda.so.1"].names |= {each for each in loose - others if re.match(r"cu[A-Z]", each)}
    found["libcudart.so.13"].names |= others  # always loaded; any library serves, as these names have no version
    return found


def _compile_operators(folder: Path) -> None:
    torch = SITE / "torch" / "include"
    places = [f"-isystem{torch}", f"-isystem{torch}/torch/csrc/api/include", *_includes()]
    flags = [*(each for each in FLAGS if each != "-O0"), "-O1", "-DAT_PER_OPERATOR_HEADERS"]
    libraries = [
        str(SITE / "torch" / "lib" / f"lib{each}.so") for each in ("c10", "c10_cuda", "torch_cpu", "torch_cuda")
    ]
    source = str(HERE / "torch_operators.cc")
    run_compiler(*flags, *places, source, *libraries, "-shared", "-o", str(folder / OPERATORS))


def _includes() -> list[str]:
    return [f"-isystem{SITE / each}" for each in HEADERS]


def _defined(path: Path) -> list[str]:
    return [line.split()[-1] for line in _said("nm", "--defined-only", path).splitlines() if " T " in line]


def _said(*command: object) -> str:
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for name, text in environment().items():
        print(f"export {name}={shlex.quote(text)}")  # noqa: T201 -- a shell reads it

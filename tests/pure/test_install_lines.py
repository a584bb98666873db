"""The install commands of the pages for CPUs download no CUDA; they run against a local index of the same shape."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The section of each page that installs multiring with PyTorch.
SECTIONS = {"README.md": ("## Install\n", "## Run\n"), "docs/install.md": ("## With PyTorch\n", "## Other")}
LINE = re.compile(r"^((?:uv )?pip install .*(?:whl/cpu|'\.\[torch\]'))$", re.MULTILINE)
CPU = "https://download.pytorch.org/whl/cpu"


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Add an empty package to an index."""
    place = folder / "simple" / name
    place.mkdir(parents=True, exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    file = place / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    extra = "Provides-Extra: torch\n" if any("extra" in each for each in needs) else ""
    metadata = "".join(f"Requires-Dist: {each}\n" for each in needs)
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}{metadata}"
        )
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{each.name}">{each.name}</a>' for each in place.glob("*.whl"))
    (place / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>", encoding="utf-8")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a stand-in for PyPI, and one for PyTorch's index of CPU builds, which may lag behind."""
    folder = tmp_path_factory.mktemp("indexes")
    pypi, cpu = folder / "pypi", folder / "cpu"
    for version in ("2.8.0", "2.9.0"):
        wheel(pypi, "torch", version, "nvidia-cuda-runtime==1.0")
    wheel(pypi, "nvidia-cuda-runtime", "1.0")
    wheel(pypi, "multiring", "9.0", 'torch>=2.4; extra == "torch"')
    wheel(cpu, "torch", "2.8.0+cpu")
    return pypi, cpu


def installed(lines: list[str], indexes: tuple[Path, Path], folder: Path) -> set[str]:
    """Run the commands in a new environment; return the installed packages."""
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    pypi, cpu = (f"file://{each}/simple" for each in indexes)
    for line in lines:
        words = shlex.split(line.replace(CPU, cpu).replace("'.[torch]'", "'multiring[torch]'"))
        program = ["uv", "pip", "install", "--python", str(python)]
        if words[0] != "uv":
            program = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        arguments = words[words.index("install") + 1 :]
        variables = {"PIP_INDEX_URL": pypi, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "UV_NO_CONFIG": "1"}
        variables |= {"UV_INDEX_URL": pypi}
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        subprocess.run([*program, *arguments], env=kept | variables, check=True, timeout=240)
    return {each.name.partition("-")[0] for each in (folder / "env").rglob("*.dist-info")}


@pytest.mark.parametrize(
    ("page", "tool"), [("README.md", "pip"), ("docs/install.md", "pip"), ("docs/install.md", "uv")]
)
def test_the_lines_for_cpus_download_no_cuda(page: str, tool: str, indexes: tuple[Path, Path], tmp_path: Path) -> None:
    if shutil.which(tool) is None and tool == "uv":
        pytest.skip("uv is not installed")
    begin, end = SECTIONS[page]
    section = (ROOT / page).read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    lines = [line for line in LINE.findall(section) if line.startswith("uv ") == (tool == "uv")]
    assert len(lines) == 2
    assert installed(lines, indexes, tmp_path) == {"torch", "multiring"}


def test_without_the_first_line_cuda_comes(indexes: tuple[Path, Path], tmp_path: Path) -> None:
    """The test indexes are realistic: without the first command, pip installs CUDA."""
    assert installed(["pip install '.[torch]'"], indexes, tmp_path) == {"torch", "multiring", "nvidia_cuda_runtime"}

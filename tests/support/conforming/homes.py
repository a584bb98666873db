"""The frameworks of the conformance tests, and the environments of their ranks.

A `Home` is the interpreter, the paths and the variables of a job's ranks.
"""

import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.support.nursery import Home
from tests.support.ranks import USED_FIRST

from multiring._bench.install import RECIPES, install

ROOT = Path(__file__).parents[3]
PACKAGE = "tests.support.conforming"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework under test; `wants` lists the modules that must be installed."""

    name: str
    module: str
    wants: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    recipe: str = ""  # installs the framework's own environment
    path: tuple[str, ...] = ()  # additional entries of sys.path
    used_first: tuple[str, ...] = ()  # modules that the framework imports on first use; they are imported early
    nursery: str = ""  # the name under which other tests fork ranks of the framework

    @property
    def example(self) -> str:
        """The name of the framework's example in examples/digits."""
        name = self.module.rpartition("on_")[2]
        return "with_numpy" if name == "toy" else f"with_{name}"

    @property
    def home(self) -> Home:
        if not self.recipe:
            path = (*sys.path, *self.path)
            imports = (self.module, *self.used_first)
            name = self.nursery or self.name
            return Home(name=name, path=path, environment=self.environment, imports=imports)
        return Home(
            name=self.name,
            python=str(environment_of(self.recipe) / "bin" / "python"),
            path=(str(ROOT), str(ROOT / "src")),
            environment=self.environment,
            imports=(self.module,),
        )

    @property
    def digits_home(self) -> Home:
        """The interpreter and environment of the ranks that train examples/digits.

        On x86-64, tinygrad's own assembler replaces its slow interpreter.
        """
        if dict(self.environment).get("DEV") != "PYTHON" or platform.machine() != "x86_64":
            return self.home
        environment = dict(self.environment) | {"DEV": "CPU:X86"}
        return replace(self, name=f"{self.name}-x86", environment=tuple(sorted(environment.items()))).home

    def missing(self) -> str:
        """Return why the framework cannot be tested here, or ""."""
        lacking = [each for each in self.wants if importlib.util.find_spec(each) is None]
        if lacking:
            return f"`import {lacking[0]}` finds no module here"
        newest = RECIPES[self.recipe].newest_python if self.recipe else None
        if newest and sys.version_info[:2] > newest:
            return f"{self.name} runs on Python {newest[0]}.{newest[1]} at most, and the core here is of a newer one"
        return ""


@cache
def environment_of(recipe: str) -> Path:
    """Return the environment of `recipe` in the user's cache; install it if needed."""
    return install(recipe, lambda _: None)


def _tinygrad_environment() -> dict[str, str]:
    """Return the settings with which tinygrad computes on this machine.

    tinygrad uses clang if it is installed. Otherwise tinygrad interprets operations, and gcc compiles the code that its
    CPU device needs to start.
    """
    if shutil.which("clang"):
        return {"DEV": "CPU"}
    return {"DEV": "PYTHON", "CC": str(Path(__file__).with_name("gcc_as_clang.sh"))}


def _of(name: str, wants: tuple[str, ...] = (), module: str = "", recipe: str = "", **environment: str) -> Framework:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment
    return Framework(name, f"{PACKAGE}.on_{module or name}", wants, tuple(sorted(quiet.items())), recipe)


FRAMEWORKS = {
    each.name: each
    for each in (
        _of("toy"),
        replace(_of("torch", ("torch",)), used_first=USED_FIRST["torch"], nursery="torch"),
        replace(_of("tensorflow", ("tensorflow",)), nursery="tf"),
        replace(_of("keras-tensorflow", ("keras", "tensorflow"), "keras", KERAS_BACKEND="tensorflow"), nursery="keras"),
        replace(
            _of("keras-torch", ("keras", "torch"), "keras", KERAS_BACKEND="torch"),
            used_first=USED_FIRST["torch"],
            nursery="keras",
        ),
        replace(_of("keras-jax", ("keras", "jax"), "keras", KERAS_BACKEND="jax"), nursery="keras"),
        replace(_of("jax", ("jax",)), nursery="jax"),
        _of("chainer", recipe="chainer"),
        replace(
            _of("tinygrad", ("tinygrad",), PARALLEL="0", **_tinygrad_environment()),
            path=(str(ROOT / "examples"),),
        ),
        _of("caffe", ("caffe",)),
        replace(_of("caffe"), name="caffe-standin", path=(str(ROOT / "tests" / "support" / "caffe_standin"),)),
    )
}

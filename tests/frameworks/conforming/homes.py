"""Where the ranks of each framework are at home, and what its module here is."""

import importlib.util
from dataclasses import dataclass

from tests.wire.nursery import Home

PACKAGE = "tests.frameworks.conforming"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework as tests know it; `wants` is what has to be installed for it."""

    name: str
    module: str
    wants: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def home(self) -> Home:
        return Home(name=self.name, environment=self.environment, imports=(self.module,))

    def missing(self) -> list[str]:
        return [each for each in self.wants if importlib.util.find_spec(each) is None]


def _of(name: str, wants: tuple[str, ...] = (), module: str = "", **environment: str) -> Framework:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment
    return Framework(name, f"{PACKAGE}.on_{module or name}", wants, tuple(sorted(quiet.items())))


FRAMEWORKS = {
    each.name: each
    for each in (
        _of("toy"),
        _of("torch", ("torch",)),
        _of("tensorflow", ("tensorflow",)),
        _of("keras-tensorflow", ("keras", "tensorflow"), "keras", KERAS_BACKEND="tensorflow"),
        _of("keras-torch", ("keras", "torch"), "keras", KERAS_BACKEND="torch"),
        _of("keras-jax", ("keras", "jax"), "keras", KERAS_BACKEND="jax"),
        _of("jax", ("jax",)),
    )
}

"""A Ray, Dask or Spark that is missing or too old: the error names both releases and what to install."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import multiring.dask
import multiring.ray
import multiring.spark
from multiring._launch.horovod import path_with_horovod
from multiring.errors import LaunchError, UnsupportedError

RUNS: dict[str, Callable[[], Any]] = {
    "ray": lambda: multiring.ray.run(print, 1),
    "distributed": lambda: multiring.dask.run(None, print, 1),
    "pyspark": lambda: multiring.spark.run(print, 1),
}


def use(monkeypatch: pytest.MonkeyPatch, name: str, release: str | None) -> None:
    """Let `import name` find a module of that release, or none."""
    for former in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, former)
    if release is None:
        monkeypatch.setitem(sys.modules, name, None)
        return
    made = ModuleType(name)
    made.__version__ = release  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, made)
    if name == "pyspark":
        sql = ModuleType("pyspark.sql")
        sql.SparkSession = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pyspark.sql", sql)


@pytest.mark.parametrize(
    ("name", "release", "text"),
    [
        ("ray", "2.39.1", r"Ray 2\.39\.1 is too old: want 2\.40 or newer; pip install 'ray>=2\.40' on every host"),
        ("distributed", "2024.7.1", r"distributed 2024\.7\.1 is too old: want 2024\.8 or newer; pip install 'distr"),
        ("pyspark", "3.4.4", r"pyspark 3\.4\.4 is too old: want 3\.5 or newer; pip install 'pyspark>=3\.5' on every"),
    ],
)
def test_an_old_release_is_named_with_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, release: str, text: str
) -> None:
    use(monkeypatch, name, release)
    with pytest.raises(LaunchError, match=text):
        RUNS[name]()


@pytest.mark.parametrize(("name", "extra"), [("ray", "ray"), ("distributed", "dask"), ("pyspark", "spark")])
def test_a_missing_framework_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    use(monkeypatch, name, None)
    with pytest.raises(LaunchError, match=rf"pip install 'multiring\[{extra}\]'"):
        RUNS[name]()


@pytest.mark.parametrize("begin", ["", "create_settings"])
def test_horovods_elastic_executor_is_refused_with_what_to_use(begin: str) -> None:
    from multiring.horovod.ray_executor import ElasticRayExecutor  # noqa: PLC0415 -- only this test needs it

    made = getattr(ElasticRayExecutor, begin) if begin else ElasticRayExecutor
    with pytest.raises(UnsupportedError, match=r"Use horovod\.ray\.RayExecutor\(settings, num_workers=\.\.\.\)"):
        made(min_num_proc=1, max_num_proc=4)


@pytest.mark.parametrize(
    "asked", [{"min_workers": 1}, {"max_workers": 4}, {"reset_limit": 3}, {"cooldown_range": (1, 2)}]
)
def test_horovods_executor_refuses_a_varying_number_of_ranks(asked: dict[str, Any]) -> None:
    from multiring.horovod.ray_executor import RayExecutor  # noqa: PLC0415 -- only this test needs it

    with pytest.raises(UnsupportedError, match="the number of ranks is fixed; pass num_workers"):
        RayExecutor(RayExecutor.create_settings(), num_workers=2, **asked)


@pytest.mark.parametrize(
    "module", ["horovod.ray", "horovod.ray.runner", "horovod.ray.elastic", "horovod.ray.elastic_v2"]
)
def test_horovods_modules_of_ray_are_there(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", path_with_horovod(os.environ))
    program = f"import {module} as found; print(*found.__all__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "RayExecutor" in done.stdout, done.stderr

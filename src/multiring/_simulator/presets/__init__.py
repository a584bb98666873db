"""Known clusters: a topology file for each, in which every number names its source.

The file of a preset is a topology file with two more tables: `[about]` and `[sources]`, which gives the source of each
number by its path in the file, without the places in lists.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from multiring._topology import Topology, topology_of_table
from multiring.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ABOUT = ("title", "accelerator", "usd_per_host_hour", "priced")


@dataclass(frozen=True, slots=True)
class Preset:
    """A known cluster, with one rank for each accelerator.

    `sources` maps the path of each number to its source. A price has the date for which it was valid.
    """

    title: str
    accelerator: str
    topology: Topology
    sources: Mapping[str, str]
    usd_per_host_hour: float | None = None
    priced: str = ""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(each.name.removesuffix(".toml") for each in files if each.name.endswith(".toml"))


def preset(name: str) -> Preset:
    """Return the preset with this name.

    Raises:
        ArgumentError: there is no such preset.
    """
    if name not in preset_names():
        raise ArgumentError(f"no topology {name!r}: want a file, or one of {', '.join(preset_names())}")
    return preset_of((resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8"), name)


def preset_of(text: str, name: str) -> Preset:
    """Return the preset in `text`.

    Raises:
        ArgumentError: the text is no topology with the tables of a preset, a number has no source, or a source belongs
            to no number.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"preset {name!r} is not valid TOML: {error}") from None
    return preset_of_table(table, name)


def preset_of_table(table: Mapping[str, Any], name: str) -> Preset:
    """Return the same as `preset_of`, from the tables of its text."""
    table = dict(table)
    about, sources = table.pop("about", {}), table.pop("sources", {})
    _check_about(about, sources, name)
    numbers = set(_numbers({"about": about, **table}))
    for path in sorted(numbers ^ set(sources)):
        lacks = "has no source" if path in numbers else "has a source, but is no number of the file"
        raise ArgumentError(f"preset {name!r}: {path} {lacks}: want exactly one entry in [sources] for each number")
    topology = topology_of_table(table)
    # An accelerator reduces while it receives, so reductions are part of the links' rates.
    links = [replace(rail, reduce_bytes_per_s=math.inf) for rail in topology.rails]
    return Preset(
        title=about["title"],
        accelerator=about["accelerator"],
        topology=replace(topology, shm=replace(topology.shm, reduce_bytes_per_s=math.inf), rails=tuple(links)),
        sources=sources,
        usd_per_host_hour=about.get("usd_per_host_hour"),
        priced=about.get("priced", ""),
    )


def _check_about(about: Any, sources: Any, name: str) -> None:
    """Raise ArgumentError unless both are tables with what a preset needs."""
    for group, values in (("about", about), ("sources", sources)):
        if not isinstance(values, Mapping):
            raise ArgumentError(f"preset {name!r}: {group} = {values!r}: want a table [{group}]")
    for path, words in sources.items():
        if not isinstance(words, str) or not words.strip():
            raise ArgumentError(f"preset {name!r}: sources: {path} = {words!r}: want a text that is not empty")
    strange = sorted(set(about) - set(_ABOUT))
    if strange or not {"title", "accelerator"} <= set(about):
        raise ArgumentError(f"preset {name!r}: [about] has {', '.join(about) or 'no keys'}: want {', '.join(_ABOUT)}")
    for key in ("title", "accelerator", "priced"):
        if not isinstance(about.get(key, ""), str):
            raise ArgumentError(f"preset {name!r}: about: {key} = {about[key]!r}: want text")
    usd: Any = about.get("usd_per_host_hour")
    if usd is not None and (isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 < usd < math.inf):
        raise ArgumentError(f"preset {name!r}: about: usd_per_host_hour = {usd!r}: want a number > 0")
    if (usd is None) != ("priced" not in about):
        raise ArgumentError(f"preset {name!r}: about: want usd_per_host_hour with priced, the date of the price")


def _numbers(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the numbers in `value`, and of the names of hosts, which say how many there are."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, path)
    elif path == "hosts.name" or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield path

"""multiring settings: list every environment variable of multiring, with its unit, default and current value.

With --markdown the command prints the page docs/settings.md.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any

from multiring._cli.output import show
from multiring._foreign_variables import FOREIGN_VARIABLES
from multiring._settings import HOROVOD_READ, Settings, environment_of, inherited_environment

_HEAD = """# Settings

`init` reads these environment variables. An argument overrides the environment, and the environment overrides the
default. An invalid value or an unknown name is an error. `multiring settings` prints the variables with their current
values. `multiring run --env NAME=VALUE` sets a variable for the ranks.

```console
$ MULTIRING_STALL_WARN_S=10 multiring run -n 2 train.py
```

| variable | value | default | meaning |
|---|---|---|---|"""
_OTHERS = """
## Variables of other programs

`init` of `multiring.torch`, `.tensorflow` and `.keras` also reads {horovod}.
[horovod.md](horovod.md) explains them. The variables above override them.

The following variables of other programs are read too. If `multiring run` did not start the ranks, the variables of
the launcher give a process its rank.

| variable | program and meaning |
|---|---|"""
_PAGE = re.compile(r"docs/(\w+\.md)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--markdown", action="store_true", help="print the page docs/settings.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings and return 0.

    An invalid variable in the environment is an error.
    """
    for line in page() if arguments.markdown else _listed():
        show(line)
    return 0


def page() -> Iterable[str]:
    """Yield the lines of docs/settings.md."""
    yield _HEAD
    for each in fields(Settings):
        told = each.metadata
        meaning = _PAGE.sub(r"[\1](\1)", told["meaning"])
        yield f"| `{told['name']}` | {told['wanted']} | {default_of(each) or 'none'} | {meaning} |"
    *first, last = (f"`{name}`" for name in HOROVOD_READ)
    yield _OTHERS.format(horovod=f"{', '.join(first)} and {last}")
    for name, meaning in FOREIGN_VARIABLES.items():
        yield f"| `{name}` | {meaning} |"


def default_of(setting: "Field[Any]") -> str:
    """Return a setting's default as its variable's text, or "" without a default."""
    if setting.default is None:
        return ""
    if isinstance(setting.default, bool):
        return str(int(setting.default))
    text = environment_of(**{setting.name: setting.default})[setting.metadata["name"]]
    return text.removesuffix(".0")


def _listed() -> Iterable[str]:
    Settings.from_environment()  # raises if a variable is invalid
    given = inherited_environment()
    for each in fields(Settings):
        name = each.metadata["name"]
        is_secret = each.name == "secret"
        shown = "***" if is_secret and name in given else given.get(name)
        value = f"{shown} (set here)" if shown is not None else default_of(each) or "not set"
        yield f"{name} = {value}"
        yield f"    {each.metadata['wanted']}: {each.metadata['meaning']}"

"""multiring settings: every environment variable that is read, with its unit, its default and what it is here.

With --markdown the page docs/settings.md, which is made so.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any

from multiring.cli.output import show
from multiring.settings import FOREIGN_VARIABLES, HOROVOD_READ, Settings, environment_of, inherited_environment

_HEAD = """# Settings

Environment variables, read when `init` is called. An argument wins over the environment, the environment over the
default; a value that makes no sense, or a name that is not known, is an error. `multiring settings` prints them with
the values they have here; `multiring run --env NAME=VALUE` sets one for the ranks.

```console
$ MULTIRING_STALL_WARN_S=10 multiring run -n 2 train.py
```

| variable | value | default | meaning |
|---|---|---|---|"""
_OTHERS = """
## Of others

`init` of `multiring.torch`, `.tensorflow` and `.keras` also reads {horovod}: [horovod.md](horovod.md) says what
they mean. They lose against the variables above.

Of other launchers these say who a rank is, where `multiring run` has not:

| variable | of |
|---|---|"""
_PAGE = re.compile(r"docs/(\w+\.md)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--markdown", action="store_true", help="as a page of docs")


def run(arguments: argparse.Namespace) -> int:
    """Print them; a wrong one of the environment is an error."""
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
    """Return a setting's default as the environment would say it; "" where there is none."""
    if setting.default is None:
        return ""
    if isinstance(setting.default, bool):
        return str(int(setting.default))
    text = environment_of(**{setting.name: setting.default})[setting.metadata["name"]]
    return text.removesuffix(".0")


def _listed() -> Iterable[str]:
    Settings.from_environment()  # a wrong one is told
    given = inherited_environment()
    for each in fields(Settings):
        name = each.metadata["name"]
        is_secret = each.name == "secret"
        shown = "***" if is_secret and name in given else given.get(name)
        value = f"{shown} (set here)" if shown is not None else default_of(each) or "not set"
        yield f"{name} = {value}"
        yield f"    {each.metadata['wanted']}: {each.metadata['meaning']}"

"""Make docs/frameworks.md and README's table from the conformance suite's results.

`python tests/support/frameworks_page.py [NAME...]` runs for some minutes. It tests the named frameworks, or all of
them by default, and stores each result in build/frameworks. Then it makes the page from the latest result of each
framework.
"""

import argparse
import datetime as dt
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.conforming import jobs
from tests.support.conforming.homes import FRAMEWORKS, Framework
from tests.support.faults import kill
from tests.support.ranks import report_of, run_ranks

from multiring.adapters.conformance import CHECKS, ENDS

ROOT = Path(__file__).parents[2]
PAGE, README, FOUND = ROOT / "docs" / "frameworks.md", ROOT / "README.md", ROOT / "build" / "frameworks"
README_HEAD = "| framework | interface | version tested | checks passed |"
# README's rows: a framework, its interface, and the columns of the page that the row sums up.
_README_ROWS = (
    ("[PyTorch](docs/torch.md)", "`distribute`, Horovod's interface, a torch.distributed backend", ("torch",)),
    ("[TensorFlow](docs/tensorflow.md)", "`distribute`, Horovod's interface", ("tensorflow",)),
    (
        "[Keras 3](docs/keras.md) on TensorFlow, torch, JAX",
        "`distribute`, Horovod's interface",
        ("keras-tensorflow", "keras-torch", "keras-jax"),
    ),
    ("[JAX](docs/jax.md)", "`distribute`, collectives inside `jit`", ("jax",)),
    ("[Chainer](docs/chainer.md)", "`distribute`, ChainerMN's interface", ("chainer",)),
    (
        "[Caffe](docs/caffe.md), with a stand-in for pycaffe",
        "`distribute`, `multiring caffe train`",
        ("caffe-standin",),
    ),
    ("[any other](docs/adapters.md), with tinygrad as the example", "an adapter of five functions", ("tinygrad",)),
)
ROWS = (*CHECKS, *ENDS)
PASSED, FAILED = "yes", "NO"
TITLES = {
    "toy": "toy",
    "torch": "torch",
    "tensorflow": "TensorFlow",
    "keras-tensorflow": "Keras on TensorFlow",
    "keras-torch": "Keras on torch",
    "keras-jax": "Keras on JAX",
    "jax": "JAX",
    "chainer": "Chainer",
    "tinygrad": "tinygrad",
    "caffe": "Caffe",
    "caffe-standin": "Caffe's stand-in",
}
_PATIENCE_S = 300
_HEAD = """# Frameworks

See what each framework's adapter does. `yes` means that the check passed. A number is the reason
why the check was not run; the reasons are below the table. [adapters.md](adapters.md) explains each
row. [interface.md](interface.md) lists the functions of each adapter.

`python tests/support/frameworks_page.py` made this page on {when}
with {where}. Tests verify that the page has these rows and columns, and that each
`yes` still passes.

"""


@dataclass(slots=True)
class Column:
    """The results of one framework."""

    version: str = "-"
    cells: dict[str, str] = field(default_factory=dict)  # by row: yes, NO, or the reason why the check was not tried
    told_s: dict[str, float] = field(default_factory=dict)  # by fault: the seconds until ranks detected it
    accuracy: float | None = None
    speed: float | None = None


def tried(framework: Framework) -> Column:
    """Run all checks for one framework."""
    lacking = framework.missing()
    if lacking:
        return Column(cells=dict.fromkeys(ROWS, lacking))
    found = Column()
    module, home = framework.module, framework.home
    report = report_of(jobs.suite, 3, module, home=home, deadline_s=_PATIENCE_S)
    _, found.version, results = report.outcomes[0].value
    for check, outcome, text in results:
        found.cells[check] = {"passed": PASSED, "failed": FAILED}.get(outcome, text)
    report = report_of(
        jobs.lose_a_rank, 3, module, None, home=home, faults=[kill(2).at("at work").after(0.2)], deadline_s=_PATIENCE_S
    )
    _note(found, "killed rank", [report.outcomes[rank].value for rank in (0, 1)])
    report = report_of(jobs.lose_a_rank, 3, module, 1, home=home, deadline_s=_PATIENCE_S)
    _note(found, "exception on one rank", [report.outcomes[rank].value for rank in (0, 2)])
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(jobs.be_interrupted, 2, module, f"{folder}/over", home=home, deadline_s=_PATIENCE_S)
    _note(found, "Ctrl-C", [report.outcomes[0].value])
    out = run_ranks(
        jobs.timed_digits, 2, module, framework.example, None, home=framework.digits_home, deadline_s=_PATIENCE_S
    )
    _, found.accuracy, steps_a_second = out[0]
    found.speed = 96 * steps_a_second
    return found


def _note(found: Column, row: str, told_s: list[Any]) -> None:
    found.cells[row] = FAILED if None in told_s else PASSED
    if None not in told_s:
        found.told_s[row] = max(told_s)


def page(columns: dict[str, Column]) -> str:
    """Return the text of docs/frameworks.md."""
    reasons = list(dict.fromkeys(text for each in columns.values() for text in each.cells.values()))
    reasons = [text for text in reasons if text not in {PASSED, FAILED}]
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [_HEAD.format(when=dt.datetime.now(dt.timezone.utc).date(), where=where).rstrip(), ""]
    lines += ["| | " + " | ".join(TITLES[name] for name in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += ["| version | " + " | ".join(each.version for each in columns.values()) + " |"]
    for row in ROWS:
        cells = [_shown(each.cells[row], reasons) for each in columns.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    for title, wanted in (("passed", {PASSED}), ("failed", {FAILED}), ("not tried", set(reasons))):
        counts = [sum(text in wanted for text in each.cells.values()) for each in columns.values()]
        lines.append(f"| **{title}** | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "Reasons why checks were not tried:", ""]
    for number, text in enumerate(reasons, 1):
        count = sum(text in each.cells.values() for each in columns.values())
        lines.append(f"{number}. {text} ({count} {'column' if count == 1 else 'columns'})")
    lines += ["", *_digits(columns)]
    return "\n".join(lines) + "\n"


def _shown(cell: str, reasons: list[str]) -> str:
    return cell if cell in {PASSED, FAILED} else f"{reasons.index(cell) + 1}"


def _digits(columns: dict[str, Column]) -> list[str]:
    lines = [
        "## Digits",
        "",
        "`examples/digits` trains one network in every framework, with the same data and first weights, on 2",
        "ranks for 20 epochs. Images/s is measured over the last three quarters of the training, with 96",
        "images per step. The last three columns are times in seconds. After a killed rank or an exception,",
        "the time ends when every other rank has got an error in its operation. After Ctrl-C, it ends when",
        "the program has got KeyboardInterrupt.",
        "",
        "| framework | test accuracy | images/s | killed rank | exception | Ctrl-C |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in columns.items():
        if each.accuracy is not None:
            told = [f"{each.told_s[row]:.1f}" if row in each.told_s else "-" for row in ENDS]
            lines.append(f"| {TITLES[name]} | {each.accuracy:.2%} | {each.speed:.0f} | {' | '.join(told)} |")
    return lines


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """Return the page's cells by row and column; a reason is given by its number."""
    found = {}
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    titles = [word.strip() for word in table[0][1:]]
    names = {title: name for name, title in TITLES.items()}
    for line in table[2:]:
        row = line[0].strip()
        if row in ROWS or row == "version":
            for title, cell in zip(titles, line[1:], strict=True):
                found[row, names[title]] = cell.strip()
    return found


def digits_of(text: str) -> dict[str, tuple[str, str]]:
    """Return the accuracy and images/s of each framework on the page, by title."""
    lines = text.partition("## Digits")[2].splitlines()
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: (row[1], row[2]) for row in rows[2:]}


def readme_table(text: str) -> str:
    """Return README's table, made from the text of the page."""
    cells, rows = cells_of(text), []
    for title, interface, columns in _README_ROWS:
        versions = dict.fromkeys(cells["version", name] for name in columns)
        passed = [sum(cells[row, name] == PASSED for row in ROWS) for name in columns]
        rows.append(f"| {title} | {interface} | {', '.join(versions)} | {', '.join(map(str, passed))} of {len(ROWS)} |")
    return "\n".join([README_HEAD, "|---|---|---|---|", *rows]) + "\n"


def with_table(readme: str, table: str) -> str:
    """Return `readme` with its table replaced by `table`."""
    before, _, rest = readme.partition(README_HEAD)
    lines = rest.splitlines(keepends=True)[1:]
    after = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return before + table + "".join(lines[after:])


def main() -> None:
    """Test the frameworks; write the page once every framework has a result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FRAMEWORKS))
    FOUND.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or FRAMEWORKS:
        column = tried(FRAMEWORKS[name])
        (FOUND / f"{name}.json").write_text(json.dumps(asdict(column)), encoding="utf-8")
        print(name, "is done", flush=True)  # noqa: T201 -- a command
        if FAILED in column.cells.values():
            print([row for row, cell in column.cells.items() if cell == FAILED])  # noqa: T201
    lacking = [name for name in FRAMEWORKS if not (FOUND / f"{name}.json").exists()]
    if lacking:
        print("not tried yet:", *lacking)  # noqa: T201
        return
    columns = {name: Column(**json.loads((FOUND / f"{name}.json").read_text(encoding="utf-8"))) for name in FRAMEWORKS}
    text = page(columns)
    PAGE.write_text(text, encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), readme_table(text)), encoding="utf-8")


if __name__ == "__main__":
    main()

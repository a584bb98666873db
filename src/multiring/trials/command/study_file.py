"""Read study.toml, the file of `multiring trials run`. Each error names the line and the field."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError, MultiringError
from multiring.trials.command.lines import LinePattern
from multiring.trials.command.words import names_in
from multiring.trials.plan import StudyArguments
from multiring.trials.space import distributions_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_RANKS = 1 << 16  # of one host
_SHOWN = 100  # characters of a wrong value
_ALWAYS = {"trial"}  # names that every command may have besides the parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeTable:
    """How the best trial is trained again and judged: the table [judge]."""

    seeds: tuple[int, ...]
    words: tuple[str, ...]
    result: LinePattern | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFile:
    """A study.toml, checked as far as possible without the number of ranks."""

    path: Path
    text: str = field(repr=False)
    table: Mapping[str, Any]
    words: tuple[str, ...]
    ranks: int | None
    time_limit_s: float | None
    grace_s: float
    log_dir: Path | None
    report: LinePattern | None
    result: LinePattern | None
    judge: JudgeTable | None

    def wrong(self, error: MultiringError | ImportError) -> ArgumentError:
        """Return an error of the study's arguments with the line and the field of the file that it is about."""
        text = str(error)
        found = re.match(r"space: parameter '([^']+)'", text)
        keys = ("space", found[1]) if found else (re.split(r"[=: ]", text, maxsplit=1)[0],)
        return self.error(keys, text.removeprefix(keys[0]).lstrip("=: "))

    def error(self, keys: Sequence[str], text: str) -> ArgumentError:
        """Return an error about a field."""
        return _error_at(self.path, self.text, keys, text)

    def arguments(self) -> StudyArguments:
        """Return the arguments of the study, with the sampler and the pruner made.

        Raises:
            ArgumentError: Optuna refuses the sampler or the pruner.
            ImportError: Optuna is not installed.
        """
        given = self.table
        return StudyArguments(
            space=given["space"],
            trials=given["trials"],
            ranks_per_trial=given.get("ranks_per_trial", 1),
            direction=given.get("direction", "minimize"),
            sampler=self._made("sampler"),
            pruner=self._made("pruner"),
            storage=given.get("storage"),
            name=given.get("name", "study"),
            time_limit_s=self.time_limit_s,
        )

    def _made(self, key: str) -> Any:
        """Return the sampler or the pruner that a table describes, or None."""
        import optuna  # noqa: PLC0415 -- only studies need it

        if key not in self.table:
            return None
        options = dict(self.table[key])
        kind = options.pop("kind")
        base = optuna.samplers.BaseSampler if key == "sampler" else optuna.pruners.BasePruner
        module = optuna.samplers if key == "sampler" else optuna.pruners
        classes = {
            name: each
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, base) and each is not base
        }
        if kind not in classes:
            raise self.error((key, "kind"), f"{kind!r}: want one of {', '.join(sorted(classes))}")
        if kind == "GridSampler":
            options.setdefault("search_space", self.table["space"])
        try:
            return classes[kind](**options)
        except Exception as error:  # noqa: BLE001 -- each class refuses its arguments in its own way
            named = next((name for name in options if re.search(rf"\b{re.escape(name)}\b", str(error))), None)
            keys = (key, "kind") if named is None else (key, named)
            raise self.error(keys, f"{kind} refuses its options: {error}") from None


def read_study_file(path: Path, command: Sequence[str]) -> StudyFile:
    """Read the file of a study.

    Args:
        path: the file.
        command: the words of the command line after the file, which may have parameters in braces.

    Raises:
        ArgumentError: the file cannot be read, is not TOML, or has a wrong field. The text names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the study in {path}: {error}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{path} is not valid TOML: {error}") from None
    return _Reader(path, text, table).study(command)


class _Reader:
    """Checks the fields of one file."""

    def __init__(self, path: Path, text: str, table: dict[str, Any]) -> None:
        self._path, self._text, self._table = path, text, table

    def study(self, command: Sequence[str]) -> StudyFile:
        """Return the checked file."""
        self._require_fields((), self._table, _FIELDS)
        for key in ("trials", "space"):
            if key not in self._table:
                raise self._error((key,), f"it is missing: want {_FIELDS[key][0]}")
        try:
            distributions_of(self._table["space"])
        except ArgumentError as error:
            found = re.match(r"space: parameter '(.+?)' is ", str(error))
            raise self._error(
                ("space", found[1]) if found else ("space",), str(error).removeprefix("space: ")
            ) from None
        for key in ("sampler", "pruner"):
            if key in self._table and not isinstance(self._table[key].get("kind"), str):
                raise self._error((key,), "its kind is missing: want the name of a class of Optuna")
        for name in self._table["space"]:
            if not re.fullmatch(r"\w+", name) or name in ("trial", "seed"):
                raise self._error(("space", name), "want letters, digits and _, and neither 'trial' nor 'seed'")
        words = tuple(self._table.get("words", ()))
        self._check_words(words, command)
        return StudyFile(
            path=self._path,
            text=self._text,
            table=self._table,
            words=words,
            ranks=self._table.get("ranks"),
            time_limit_s=self._table.get("time_limit_s"),
            grace_s=float(self._table.get("grace_s", 5.0)),
            log_dir=None if "log_dir" not in self._table else Path(self._table["log_dir"]),
            report=self._pattern(("report",)),
            result=self._pattern(("result",)),
            judge=self._judge(),
        )

    def _check_words(self, words: Sequence[str], command: Sequence[str]) -> None:
        space = set(self._table["space"])
        for name in sorted({each for word in words for each in names_in(word)} - space - _ALWAYS):
            raise self._error(("words",), f"{{{name}}} is no parameter of the study: want one of {sorted(space)}")
        used = {each for word in (*words, *command) for each in names_in(word)}
        for name in self._table["space"]:
            if name not in used and name != self._table.get("ranks_per_trial"):
                raise self._error(
                    ("space", name),
                    f"no word of the command has {{{name}}}, so it would have no effect; want words such as "
                    f'words = ["--{name}", "{{{name}}}"]',
                )

    def _judge(self) -> JudgeTable | None:
        table = self._table.get("judge")
        if table is None:
            return None
        self._require_fields(("judge",), table, _JUDGE_FIELDS)
        for key in ("seeds", "words"):
            if key not in table:
                raise self._error(("judge",), f"{key} is missing: want {_JUDGE_FIELDS[key][0]}")
        names = {each for word in table["words"] for each in names_in(word)}
        if "seed" not in names:
            raise self._error(
                ("judge", "words"), 'no word has {seed}, so all runs would be the same; want "--seed", "{seed}"'
            )
        for name in sorted(names - set(self._table["space"]) - _ALWAYS - {"seed"}):
            raise self._error(("judge", "words"), f"{{{name}}} is no parameter of the study")
        return JudgeTable(
            seeds=tuple(table["seeds"]), words=tuple(table["words"]), result=self._pattern(("judge", "result"))
        )

    def _pattern(self, keys: tuple[str, ...]) -> LinePattern | None:
        table: Any = self._table
        for key in keys:
            table = table.get(key)
            if table is None:
                return None
        try:
            return LinePattern(table, has_step=keys == ("report",))
        except ValueError as error:
            raise self._error(keys, str(error)) from None

    def _require_fields(self, keys: tuple[str, ...], table: Mapping[str, Any], wanted: Mapping[str, "_Field"]) -> None:
        for key, value in table.items():
            if key not in wanted:
                raise self._error((*keys, key), f"unknown field: want one of {', '.join(wanted)}")
            what, is_right = wanted[key]
            if not is_right(value):
                raise self._error((*keys, key), f"{repr(value)[:_SHOWN]}: want {what}")

    def _error(self, keys: Sequence[str], text: str) -> ArgumentError:
        return _error_at(self._path, self._text, keys, text)


def _error_at(path: Path, table: str, keys: Sequence[str], text: str) -> ArgumentError:
    """Return an error about a field, with the line of the file whose text is `table`."""
    line = line_of(table, keys)
    where = f", line {line}" if line else ""
    return ArgumentError(f"{path}{where}: {'.'.join(keys)}: {text}")


_Field = tuple[str, Callable[[Any], bool]]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_seconds(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value and math.isfinite(value)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and "\0" not in each for each in value)


def _are_seeds(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
        and len(set(value)) == len(value)
    )


_FIELDS: Mapping[str, _Field] = {
    "name": ("a text, the study's name in the storage", _is_text),
    "direction": ("'minimize' or 'maximize'", lambda value: value in ("minimize", "maximize")),
    "trials": ("the number of trials, 1 or more", _is_count),
    "ranks": (
        f"the number of ranks that run at a time, 1 to {MOST_RANKS}",
        lambda value: _is_count(value) and value <= MOST_RANKS,
    ),
    "ranks_per_trial": (
        "a number of ranks, or the name of a parameter",
        lambda value: _is_count(value) or _is_text(value),
    ),
    "time_limit_s": ("seconds above 0", lambda value: _is_seconds(value, 1e-3)),
    "grace_s": ("seconds, 0 to 3600", lambda value: _is_seconds(value, 0.0) and value <= 3600),
    "storage": ("a path or a URL, as in 'study.db'", _is_text),
    "words": ("a list of words, as in ['--rate', '{rate}']", _are_words),
    "report": ("a line with {value}, as in 'epoch {step}: loss {value}'", _is_text),
    "result": ("a line with {value}, as in 'test loss {value}'", _is_text),
    "log_dir": ("the path of a folder", _is_text),
    "space": ("a table of parameters", lambda value: isinstance(value, dict) and bool(value)),
    "sampler": ("a table such as {kind = 'TPESampler', seed = 1}", lambda value: isinstance(value, dict)),
    "pruner": ("a table such as {kind = 'MedianPruner'}", lambda value: isinstance(value, dict)),
    "judge": ("a table with seeds and words", lambda value: isinstance(value, dict)),
}
_JUDGE_FIELDS: Mapping[str, _Field] = {
    "seeds": ("a list of different whole numbers, as in [101, 102, 103]", _are_seeds),
    "words": ("a list of words with {seed}, as in ['--seed', '{seed}']", _are_words),
    "result": ("a line with {value}, as in 'test loss {value}'", _is_text),
}
_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def line_of(text: str, keys: Sequence[str]) -> int:
    """Return the line, from 1, of a field in a TOML file, or of the innermost table around it; 0 if there is none."""
    table: tuple[str, ...] = ()
    best, best_line, end = 0, 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if end:  # inside a text of several lines
            end = "" if end in line else end
            continue
        header, key = _TABLE.match(line), _KEY.match(line)
        if header is not None:
            table = _parts(header[1])
            found = table
        elif key is not None:
            found = (*table, *_parts(key[1]))
            rest = line[key.end() :]
            end = next((quote for quote in ('"""', "'''") if rest.count(quote) % 2), "")
        else:
            continue
        if len(found) <= len(keys) and tuple(keys[: len(found)]) == found and len(found) > best:
            best, best_line = len(found), number
    return best_line


def _parts(dotted: str) -> tuple[str, ...]:
    found = re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)
    return tuple(each[1:-1] if each[0] in "\"'" else each for each in found)

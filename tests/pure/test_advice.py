"""Messages give valid advice: the commands, options, settings, names, pages and keywords in them exist.

The rule covers every text in the package's source. A rename could otherwise leave advice that points to nothing.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest

import multiring
from multiring._cli import COMMANDS
from multiring._settings import Settings

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "multiring"

# Options of other programs that messages mention or that multiring passes on.
OTHERS_OPTIONS = {
    *("--bind-to", "--map-by", "--mca", "--tag-output", "--wdir", "--requeue"),  # mpiexec, srun, Slurm's batch files
    *("--mpi", "--restrict-uid", "--cipher", "--keys", "--numeric", "--metadata"),  # srun, munge, unmunge
    *("--ntasks-per-node", "--overlap", "--cpu-bind", "--input", "--kill-on-bad-exit", "--wait"),  # srun
    *("--export", "--het-group", "--job-name", "--node", "--machine"),  # srun; other launchers' names for our options
    "--no-kill",  # srun
    *("--abbrev", "--always", "--dirty", "--error-unmatch", "--no-build-isolation"),  # git, pip
    *("--master", "--master-addr", "--master-port", "--nnodes", "--node-rank", "--no-python"),  # torchrun
    *("--nproc-per-node", "--num", "--main", "--log"),  # some are other launchers' names for our options
    "--nthreads",  # dask worker
    "--evaluate-every",  # of programs with multiring.training
    *("--ink", "--soft", "--rule", "--fill"),  # CSS variables of the training report
    *("--cpus", "--from-file", "--pids-limit", "--shm-size"),  # podman, docker and kubectl
    "--lab",  # parsed by `multiring lab fault` itself
}
# Variables that the package sets for itself, never the user.
OWN_VARIABLES = frozenset({"MULTIRING_ENTRY_NAME", "MULTIRING_X"})
OTHERS_KEYWORDS = {
    *("weights_only", "fullgraph", "gradient_as_bucket_view", "num_workers", "prefetch_factor", "in_order"),  # torch
    *("sparse", "persistent", "use_reentrant", "create_graph", "init_method"),
    *("jit_compile", "synchronized", "allreduce_grad_dtype", "project"),  # Keras, Chainer, wandb
    *("fill", "stroke", "points", "rx", "cx", "cy", "xmlns", "class", "href", "alt", "role"),  # SVG and HTML
}
NO_COMMAND = frozenset({"multiring pack 1"})  # the first words of a file
KEYS = frozenset({"multiring.part", "multiring.data"})  # keys in a Keras batch
MODULES = {"mt": ("torch", "tensorflow"), "hvd": ("horovod", "torch", "tensorflow")}


@dataclass(frozen=True)
class Text:
    """A string literal, with {} in place of expressions."""

    place: str
    text: str


@cache
def texts() -> tuple[Text, ...]:
    return tuple(each for path in sorted(SOURCE.rglob("*.py")) for each in texts_of(path))


def texts_of(path: Path) -> Iterator[Text]:
    parts: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            parts |= {id(each) for each in ast.walk(node)}
            known = [each.value if isinstance(each, ast.Constant) else "{}" for each in node.values]
            yield Text(place, "".join(map(str, known)))
        elif isinstance(node.value, str) and id(node) not in parts:
            yield Text(place, node.value)


# ---- commands ----


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    made = {}
    for name, module in COMMANDS.items():
        made[name] = argparse.ArgumentParser(prog=f"multiring {name}", add_help=True)
        module.add_arguments(made[name])
    return made


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser | None]:
    """Return the words that may follow a command: its subcommands, or the choices of its argument."""
    found: dict[str, argparse.ArgumentParser | None] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
        elif not action.option_strings and action.choices:
            found |= dict.fromkeys(map(str, action.choices))
    return found | dict.fromkeys(["all"] if parser.prog.endswith(" bench") else [])  # `multiring bench all`


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = {option for action in parser._actions for option in action.option_strings}
    return found.union(*(options_of(each) for each in below(parser).values() if each is not None))


COMMAND = re.compile(r"\bmultiring ([a-z]+)((?: (?:--?[a-z][\w-]*|[a-z]+|[A-Z]+|\{\}|[\w.]+))*)")


def faults_of_commands(text: str) -> list[str]:
    """Return the invalid commands of multiring that a text mentions."""
    found = []
    nested = {word for parser in parsers().values() for word, inner in below(parser).items() if inner is not None}
    for command, rest in COMMAND.findall(text):
        words = rest.split(" -- ")[0].split()
        options = [word for word in words if word.startswith("--") and word != "--"]
        if command in nested - set(COMMANDS):
            found.append(f"multiring {command}: that is a part of another command")
        elif command not in COMMANDS:
            # Without an option, the words are a sentence about multiring.
            found += [f"multiring {command}: no such command"] * bool(words[:1] and words[0].startswith("-"))
        else:
            inner = below(parsers()[command])
            if words[:1] and inner and words[0].isalpha() and words[0].islower() and words[0] not in inner:
                found.append(f"multiring {command} {words[0]}: no such part of it")
            found += [
                f"multiring {command} {option}: no such option"
                for option in options
                if option not in options_of(parsers()[command])
            ]
    return found


def test_commands_that_messages_name_are_there() -> None:
    asked = [each for each in texts() if COMMAND.search(each.text) and each.text not in NO_COMMAND]
    assert len(asked) > 50
    assert {each.place: faults for each in asked if (faults := faults_of_commands(each.text))} == {}


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+[a-z]")


def test_options_that_messages_name_are_there() -> None:
    known = OTHERS_OPTIONS.union(*(options_of(each) for each in parsers().values()))
    asked = [(each.place, option) for each in texts() for option in OPTION.findall(each.text)]
    assert len(asked) > 200
    assert [each for each in asked if each[1] not in known] == []


# ---- settings, pages ----


def test_settings_that_messages_name_are_there() -> None:
    known = {each.metadata["name"] for each in fields(Settings) if "name" in each.metadata}
    asked = [(each.place, name) for each in texts() for name in re.findall(r"\bMULTIRING_[A-Z_]*[A-Z]", each.text)]
    assert len(asked) > 100
    assert [each for each in asked if each[1] not in known | OWN_VARIABLES] == []


def test_pages_that_messages_name_are_there() -> None:
    asked = [(each.place, page) for each in texts() for page in re.findall(r"\bdocs/[\w/-]+\.md", each.text)]
    assert len(asked) > 30
    assert [each for each in asked if not (ROOT / each[1]).is_file()] == []


# ---- names ----


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a module defines or imports at any level, and the modules beside it."""
    found = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def is_there(dotted: str) -> bool:
    """Return whether `multiring.a.b` exists in the source. Attributes of classes are not checked."""
    at = SOURCE
    names = dotted.split(".")
    for place, name in enumerate(names[1:], 1):
        module = at / "__init__.py" if at.is_dir() else at
        if not (at / name).is_dir() and not (at / f"{name}.py").is_file():
            return not module.is_file() or name in names_in(module)
        at = at / name if (at / name).is_dir() else at / f"{name}.py"
        if at.suffix:
            after = names[place + 1 :]
            return not after or after[0] in names_in(at)
    return True


def named(text: str) -> Iterator[str]:
    for whole in re.findall(r"(?<![\w./-])(?:mt|hvd|multiring)\.[a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*", text):
        if whole not in KEYS and not whole.endswith(".h"):
            yield whole


def test_names_that_messages_name_are_there() -> None:
    asked = [(each.place, name) for each in texts() for name in named(each.text)]
    assert len(asked) > 100
    lost = []
    for place, name in asked:
        first, _, rest = name.partition(".")
        roots = [f"multiring.{module}" for module in MODULES.get(first, ())] or ["multiring"]
        if not any(is_there(f"{root}.{rest}") for root in roots):
            lost.append((place, name))
    assert lost == []


KEYWORD = re.compile(r"(?<![\w.\-\[&?])([a-z][a-z_]+)=(?:True|False|None|\"|'|\[|\{\}|\d)")


def test_keywords_that_messages_name_are_taken_somewhere() -> None:
    asked = [(each.place, name) for each in texts() for name in KEYWORD.findall(each.text)]
    assert len(asked) > 50
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    taken = set(re.findall(r"(?:^ +|[(,] ?\*{0,2})([a-z][a-z_]+)(?=: |[,)=])", source, re.MULTILINE))
    assert [each for each in asked if each[1] not in taken | OTHERS_KEYWORDS] == []


# ---- the rule itself ----


@pytest.mark.parametrize(
    "text",
    ["multiring launch -n 2", "see multiring pack", "multiring data packs --to X", "multiring run -n 2 --ranks 4"],
)
def test_what_is_not_there_is_found(text: str) -> None:
    assert faults_of_commands(text)


def test_lost_names_are_found() -> None:
    assert is_there("multiring.convergence.recommend_batch_size")
    assert is_there("multiring.torch.DistributedOptimizer")
    assert not is_there("multiring.convergence.advice")
    assert not is_there("multiring.torch.checkpoint.savings.x")
    assert not is_there("multiring.turch.x")
    assert multiring.__name__ == "multiring"

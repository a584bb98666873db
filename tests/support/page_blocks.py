"""The pages' Python blocks and commands, and which test_documents.py runs."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The pages whose console blocks test_documents.py runs after it has saved the pages' files, and their command counts.
DOCUMENTS = {
    "run.md": 3,
    "data.md": 6,
    "loop.md": 2,
    "tutorial.md": 7,
    "torch_optimizer.md": 2,
    "training.md": 3,
    "trials.md": 1,
    "trials_command.md": 2,
    "trials_population.md": 1,
    "vision.md": 5,
    "vision_serving.md": 1,
}
# The text "Save this as `FILE`" before a block, the block's kind, and its text.
BLOCK = re.compile(r"(?:[Ss]ave (?:it|this) as `(?P<file>[\w.]+)`[^`]*)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL)
# In a console's block a command begins with a prompt, perhaps with a host's name. In a block of shell each line is one.
# In other blocks, lines that begin with a known program are commands, and other lines are output or a drawing.
COMMANDS = {
    "console": re.compile(r"^(?:host\d)?\$ (.*?)(?: +#.*)?$"),
    "sh": re.compile(r"^([^#\s].*?)(?: +#.*)?$"),
    "": re.compile(
        r"^(?:\$ )?((?:[A-Z_]+=\S+ )*"
        r"(?:sudo|multiring|python|make|pip|uv|torchrun|mpiexec|srun|source|git|cd|horovodrun|xdg-open|head|kubectl|podman)"
        r" .*?)(?: +#.*)?$"
    ),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A block of Python, or one command, and its page."""

    page: str
    text: str
    is_run: bool  # test_documents.py runs it

    @property
    def title(self) -> str:
        """The block's title in a table: its first line that is not an import."""
        lines = [line for line in self.text.splitlines() if line]
        return next((line for line in lines if not line.startswith(("import ", "from "))), lines[0])


def pages() -> list[Path]:
    """Return README and the pages of docs; decisions and the log are history."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(*kinds: str) -> list[Shown]:
    """Return the code blocks of the given kinds on all pages."""
    found = []
    for path in pages():
        for block in BLOCK.finditer(path.read_text(encoding="utf-8")):
            if block["kind"] in kinds:
                is_run = path.name in DOCUMENTS and (block["kind"] == "console" or block["file"] is not None)
                found.append(Shown(path.name, block["text"], is_run))
    return found


def scripts_of_the_diff() -> tuple[str, str]:
    """Return README's script for one process, and the script after README's diff."""
    [diff] = [each.text.splitlines() for each in shown("diff") if each.page == "README.md"]
    single, distributed = ("\n".join(line[1:] for line in diff if line[:1] != sign) for sign in "+-")
    return single + "\n", distributed + "\n"


def commands_shown() -> list[Shown]:
    """Return every command on the pages, without those in files that the reader saves."""
    found = []
    for path in pages():
        for block in BLOCK.finditer(path.read_text(encoding="utf-8")):
            kind = block["kind"]
            if kind in COMMANDS and not block["file"]:
                is_run = path.name in DOCUMENTS and kind == "console"
                matches = (COMMANDS[kind].match(line) for line in block["text"].splitlines())
                found += [Shown(path.name, match[1], is_run) for match in matches if match]
    return found

"""What pages show as code, Python and commands, and which of it tests/frameworks/test_documents.py runs already."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages whose console blocks are run as they stand, after the files that are to be saved; with how many commands.
DOCUMENTS = {"run.md": 3, "data.md": 6, "loop.md": 2, "tutorial.md": 7, "torch_optimizer.md": 2}
# "Save this as `FILE`", where it stands before; the kind; the text.
BLOCK = re.compile(r"(?:[Ss]ave (?:it|this) as `(?P<file>[\w.]+)`[^`]*)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL)
# Of blocks that are no Python, what begins so is typed by people; the rest is what is printed, or a drawing.
COMMAND = re.compile(
    r"^(?:\$ )?((?:[A-Z_]+=\S+ )*"
    r"(?:sudo|multiring|python|make|pip|uv|torchrun|mpiexec|srun|source|git|cd|horovodrun|xdg-open) .*?)(?: +#.*)?$"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A block of Python, or one command, and where it stands."""

    page: str
    text: str
    is_run: bool  # by test_documents

    @property
    def title(self) -> str:
        """What a table calls it: the first line that imports nothing."""
        lines = [line for line in self.text.splitlines() if line]
        return next((line for line in lines if not line.startswith(("import ", "from "))), lines[0])


def pages() -> list[Path]:
    """Return what users read; decisions and the diary are history."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(*kinds: str) -> list[Shown]:
    """Return the blocks of some kinds."""
    found = []
    for path in pages():
        for block in BLOCK.finditer(path.read_text(encoding="utf-8")):
            if block["kind"] in kinds:
                is_run = path.name in DOCUMENTS and (block["kind"] == "console" or block["file"] is not None)
                found.append(Shown(path.name, block["text"], is_run))
    return found


def scripts_of_the_diff() -> tuple[str, str]:
    """Return README's script for one process, and the script that its diff makes of it."""
    [diff] = [each.text.splitlines() for each in shown("diff") if each.page == "README.md"]
    single, distributed = ("\n".join(line[1:] for line in diff if line[:1] != sign) for sign in "+-")
    return single + "\n", distributed + "\n"


def commands_shown() -> list[Shown]:
    """Return every command."""
    return [
        Shown(block.page, match[1], block.is_run)
        for block in shown("", "sh", "console")
        for line in block.text.splitlines()
        if (match := COMMAND.match(line))
    ]

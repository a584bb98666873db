"""The prose of README.md and its neighbours, of docs and of .github, without its code: python tests/prose.py [FILE...].

What proselint finds fails it. Spelling is checked by typos, beside it in `make prose`.
"""

import re
import sys
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.registry import CheckRegistry
from proselint.tools import Config, LintFile

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```.*?^```|^ {4}.*?$|`+[^`]+`+|<!--.*?-->", re.DOTALL | re.MULTILINE)
NO_WORDS = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+|\d[\d ]*")
BLANK = "\N{MIDDLE DOT}"  # neither a word nor a space, which words beside code would be "repeated" across
# Before what is more general. Markdown's quotes, dots and signs are those of the keyboard: a renderer may make others.
WANTED = {
    "typography.symbols": False,
    "typography.diacritical_marks": False,
    "typography.punctuation.exclamation": False,  # counts one in a page of a hundred lines as too many
    "typography": True,
    "archaism": True,
    "cliches": True,
    "dates_times": True,
    "hedging": True,
    "industrial_language": True,
    "lexical_illusions": True,
    "malapropisms": True,
    "misc": True,
    "mixed_metaphors": True,
    "mondegreens": True,
    "needless_variants": True,
    "nonwords": True,
    "oxymorons": True,
    "psychology": True,
    "redundancy": True,
    "skunked_terms": True,
    "social_awareness": True,
    "spelling": True,
    "terms": True,
    "uncomparables": True,
    "weasel_words": True,
}


def pages() -> list[Path]:
    """Return every page that people read, and those of the inside: diary and decisions."""
    folders = (ROOT / ".github", ROOT / "docs")
    return [*sorted(ROOT.glob("*.md")), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def without_code(text: str) -> str:
    """Return `text` with code, numbers, and where links lead, as blanks: each word keeps its line and column."""
    for pattern in (CODE, NO_WORDS):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", BLANK, match[0]), text)
    return re.sub(r"^$", BLANK, text, flags=re.MULTILINE)  # a title's last word may be the next one, too


def faults(path: Path) -> list[str]:
    """Return what is wrong in a page, each with its place."""
    text = without_code(path.read_text(encoding="utf-8"))
    found = LintFile(str(path), text).lint(Config(max_errors=1000, checks=WANTED))
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [
        f"{place}:{each.pos[0]}:{each.pos[1]}: {each.check_result.check_path}: {each.check_result.message}"
        for each in found
    ]


def main() -> None:
    """Print what is wrong; exit 1 where something is."""
    CheckRegistry().register_many(checks)
    read = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    found = [fault for path in read for fault in faults(path)]
    print("\n".join([*found, f"{len(read)} pages: {len(found)} faults of prose"]))  # noqa: T201 -- its result
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

"""Check the prose of the pages, without their code: python tests/prose.py [FILE...].

The pages are those of the top folder, docs and .github. The check fails on any finding of proselint.
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
BLANK = "\N{MIDDLE DOT}"  # neither a word nor a space, so words on both sides of code do not count as repeated
# More specific names come first. In Markdown, quotes, dots and signs stay ASCII; renderers may replace them.
WANTED = {
    "typography.symbols": False,
    "typography.diacritical_marks": False,
    "typography.punctuation.exclamation": False,  # rejects one exclamation mark in a hundred lines
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
    """Return every page, including the log and the decisions."""
    folders = (ROOT / ".github", ROOT / "docs")
    return [*sorted(ROOT.glob("*.md")), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def without_code(text: str) -> str:
    """Return `text` with code, numbers and link targets blanked, so that each word keeps its line and column."""
    for pattern in (CODE, NO_WORDS):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", BLANK, match[0]), text)
    return re.sub(r"^$", BLANK, text, flags=re.MULTILINE)  # a title and the line below it may repeat a word


def faults(path: Path) -> list[str]:
    """Return the faults of a page, each with its line and column."""
    text = without_code(path.read_text(encoding="utf-8"))
    found = LintFile(str(path), text).lint(Config(max_errors=1000, checks=WANTED))
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [
        f"{place}:{each.pos[0]}:{each.pos[1]}: {each.check_result.check_path}: {each.check_result.message}"
        for each in found
    ]


def main() -> None:
    """Print all faults; exit with code 1 if there are any."""
    CheckRegistry().register_many(checks)
    read = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    found = [fault for path in read for fault in faults(path)]
    print("\n".join([*found, f"{len(read)} pages: {len(found)} faults of prose"]))  # noqa: T201 -- its result
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

"""`make prose` finds bad prose and ignores code."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOOD = """# A page

The rank `rank` waits `for ever`, and [the page](the.md) page says so: 5 000 000 of it.

```python
x = [0 0]  # the the
```
"""
# A faulty text, and the name of the check that finds it.
BAD = {
    "Ranks wait for the the last one.\n": "lexical_illusions",
    "They wait for ever.\n": "archaism",
    "Very unique ranks are unique.\n": "uncomparables",
    "At the end of the day it is a rank.\n": "cliches",
}


def prose(*pages: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tests" / "prose.py"), *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def test_faults_of_prose_are_found_at_their_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    assert prose(page) == (0, "1 pages: 0 faults of prose\n")
    page.write_text(GOOD + "\n" + "".join(BAD))
    code, said = prose(page)
    assert code == 1
    first = GOOD.count("\n") + 2
    for line, kind in enumerate(BAD.values(), first):
        assert any(f"page.md:{line}:" in each and kind in each for each in said.splitlines()), (line, kind, said)


def test_misspelt_words_are_found_and_others_names_are_not(tmp_path: Path) -> None:
    typos = shutil.which("typos", path=sysconfig.get_path("scripts"))
    assert typos is not None
    page = tmp_path / "page.md"
    page.write_text("np.arange(3) and arrays that are writeable\n")
    command = [typos, "--config", str(ROOT / "typos.toml"), str(page)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
    page.write_text("Ranks receive it.\n".replace("ei", "ie"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "receive" in done.stdout

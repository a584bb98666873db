"""One script in four ways (examples/text): differing lines, and equal losses.

The ranks are forked, except for the script with a process group, which needs the launcher's variables.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frameworks.test_documents import ONE_THREAD
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "text"
ROW = re.compile(r"^\| `(\w+)\.py` \| (\d+) \|", re.MULTILINE)
LOSS = re.compile(r"epoch (\d+): ([\d.e-]+)")
FORKED = Process(nursery="torch", beforehand=("multiring.torch", "torch.utils.data"))


def code_of(script: str) -> list[str]:
    text = (EXAMPLES / f"{script}.py").read_text()
    return [line for line in text[text.index("\n\nfrom ") :].splitlines() if line.strip()]


def lines_that_differ(script: str) -> int:
    before, after = code_of("single"), code_of(script)
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def test_the_page_counts_the_lines() -> None:
    told = {script: int(count) for script, count in ROW.findall((ROOT / "docs" / "four_ways.md").read_text())}
    assert set(told) == {path.stem for path in EXAMPLES.glob("*.py")} - {"single", "topics"}
    assert told == {script: lines_that_differ(script) for script in told}
    assert told["distribute"] <= 6


def losses(script: str, ranks: int, *options: str) -> dict[int, float]:
    """Run a script; return its loss by epoch.

    With `ranks=0`, run one process without a launcher.
    """
    path, words = EXAMPLES / f"{script}.py", ("--dtype", "float64", *options)
    if script == "backend":
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), str(path), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        told = done.stdout
    else:
        ended = run_script(path, ranks or 1, *words, process=FORKED, start=Start(alone=ranks == 0))
        assert all(code == 0 for code, _ in ended), ended
        told = "".join(each for _, each in ended)
    return {int(epoch): float(loss) for epoch, loss in LOSS.findall(told)}


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Compare losses in few steps, on one number of ranks for each script.

    `make evidence` runs more steps on several numbers of ranks.
    """
    short = ["--sentences", "240", "--epochs", "2", "--checkpoint", str(tmp_path / "last.pt")]
    alone = losses("single", 0, *short)
    assert set(alone) == {1, 2}
    for script, ranks in (("optimizer", 2), ("backend", 2)):
        assert losses(script, ranks, *short) == pytest.approx(alone, rel=0, abs=1e-9)
    # The last step has fewer samples, and the training resumes on another number of ranks.
    tail = [*short, "--sentences", "251"]
    alone = losses("single", 0, *tail)
    assert losses("distribute", 2, *tail, "--until", "1") == pytest.approx({1: alone[1]}, rel=0, abs=1e-9)
    assert losses("distribute", 3, *tail, "--resume") == pytest.approx({2: alone[2]}, rel=0, abs=1e-9)

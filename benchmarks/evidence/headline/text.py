"""Compare the losses of 1, 2 and 3 ranks with one process over 100 steps.

    python benchmarks/evidence/headline/text.py

The program trains the text examples in several ways. It fails if the validation losses differ by more than 1e-9 in
float64 or 1e-3 in float32. It also fails if training that resumes on another number of ranks gives other losses.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples" / "text"
WITHIN = {"float64": 1e-9, "float32": 1e-3}
LOSS = re.compile(r"epoch (\d+): ([\d.e-]+)")


def losses(script: str, ranks: int, *options: str) -> dict[int, float]:
    """Return the losses that a script prints, by epoch.

    If `ranks` is 0, the script runs in one process without a launcher.
    """
    launcher = [sys.executable, "-m", "multiring", "run", "-n", str(ranks)] if ranks else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, str(EXAMPLES / f"{script}.py"), "--checkpoint", f"{folder}/last.pt", *options]
        if "--resume" in options:  # The first half of the training runs on one rank fewer.
            other = [each if each != str(ranks) else str(ranks - 1) for each in launcher]
            first = [option for option in options if option != "--resume"]
            before = [*other, *command[len(launcher) : len(launcher) + 3], *first, "--until", "2"]
            output_of(before)
        told = output_of(command)
    return {int(epoch): float(loss) for epoch, loss in LOSS.findall(told)}


def output_of(command: list[str]) -> str:
    """Return the output of a command; exit with its errors if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 -- our own script
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Compare all scripts, numbers of ranks and precisions with one process."""
    failed = False
    for dtype, within in WITHIN.items():
        for tail in ([], ["--sentences", "1231"]):
            options = ["--dtype", dtype, *tail]
            alone = losses("single", 0, *options)
            cases = [
                (script, ranks, options) for script in ("distribute", "optimizer", "backend") for ranks in (1, 2, 3)
            ]
            cases.append(("distribute", 3, [*options, "--resume"]))
            for script, ranks, given in cases if not tail else [each for each in cases if each[0] == "distribute"]:
                found = losses(script, ranks, *given)
                worst = max(abs(loss - alone[epoch]) for epoch, loss in found.items())
                told = " ".join(each for each in given if each != "--dtype")
                print(
                    f"{script} on {ranks}, {told}: epochs {min(found)} to {max(found)} differ by {worst:.1e}",
                    flush=True,
                )
                failed |= worst > within or max(found) != max(alone)
    sys.exit(failed)


if __name__ == "__main__":
    main()

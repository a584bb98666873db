"""Compare the parallelism that `parallelize` chooses with the fastest on its list.

    sudo .venv/bin/python benchmarks/evidence/parallelize/main.py [--only wide,deep,...] [--short | --divide N]

The program trains five models in a lab on this machine. It trains each model under every parallelism that fits in
memory, in turns. The result of a parallelism is the median time of its turns; a turn takes as long as its slowest rank.
The losses of all parallelisms are compared first. The exit code is 1 if the chosen parallelism is more than 10 % slower
than the fastest.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.jobs.job import ROOT, LabJob
from benchmarks.evidence.support.claims import Claim, report, shown

RANK = Path(__file__).with_name("rank.py")
# The measurements and forecasts. With this file, another time model can be checked without a machine.
RECORDS = ROOT / "build" / "evidence_parallelize.jsonl"
LAB = "--hosts 2 --slots 2 --link 1gbit"
WITHIN = 1.10
TURNS = 9
JOB_S = 600.0
MODELS = ("wide", "deep", "embedding", "convolutional", "large")


def choice(name: str, share: int) -> Iterator[Claim]:
    """Yield the claim that the choice for the model `name` is close to the fastest."""
    text = f"{name}: the choice is within {WITHIN - 1:.0%} of the best of the printed parallelisms ({LAB})"
    with LabJob(LAB, RANK, name, max(3, TURNS // share)) as job:
        try:
            job.wait_for(lambda heard: any("parallelisms" in word for word in heard), JOB_S)
        except TimeoutError as error:
            yield Claim(text=text, figure=shown([str(error)]), holds=False)
            return
        word = next(word for word in job.heard if "parallelisms" in word)
    with RECORDS.open("a") as records:
        records.write(json.dumps({"model": name, "lab": LAB, **word}) + "\n")
    tried = sorted(word["parallelisms"], key=_median)
    chosen = next(each for each in tried if each["chosen"])
    ratio = _median(chosen) / _median(tried[0])
    lines = [
        f"{each['mix']}{' (chosen)' if each['chosen'] else ''} {_median(each) * 1e3:.0f} ms"
        f" (predicted {each['predicted_s'] * 1e3:.0f})"
        for each in tried
    ]
    yield Claim(
        text=text,
        figure=f"{ratio:.3f}, losses {'agree' if word['agree'] else 'DIFFER'}, {word['backend']}: " + "; ".join(lines),
        holds=ratio <= WITHIN and word["agree"],
    )


def _median(each: dict[str, Any]) -> float:
    return float(statistics.median(each["seconds"]))


CLAIMS: dict[str, Callable[[int], Iterator[Claim]]] = {name: partial(choice, name) for name in MODELS}


if __name__ == "__main__":
    raise SystemExit(report(CLAIMS, __doc__ or ""))

"""Run experiments on the time to accuracy, piece by piece.

    python benchmarks/studies/convergence/main.py predict-stream      # measure the noise scale; commit the result, then
    python benchmarks/studies/convergence/main.py law-stream --minutes 20
    python benchmarks/studies/convergence/main.py law-stream --show

Each run is recorded in benchmarks/results/convergence_2core_202611/ when it ends. A later call continues there and does
not repeat recorded runs.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.studies.convergence import law, rows  # noqa: E402 -- after the change of the import path above
from benchmarks.studies.convergence.record import OutOfTimeError, Record  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "convergence_2core_202611"


def _foretold(record: Record, task: str) -> str:
    return "\n".join(f"- {name}: {value:,.0f}" for name, value in law.predict(record, task).items())


EXPERIMENTS: dict[str, Callable[[Record], str]] = {
    "predict-stream": partial(_foretold, task="stream"),
    "law-stream": partial(law.table, task="stream"),
    "law-fast": partial(law.table, task="fast"),
    "predict-digits": partial(_foretold, task="digits"),
    "law-digits": partial(law.table, task="digits"),
    **rows.TABLES,
}


def main() -> int:
    """Run a piece of an experiment; return 1 if the experiment is not complete yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--minutes", type=float, default=20.0, help="time after which no further run starts")
    parser.add_argument("--show", action="store_true", help="run nothing; print the recorded results")
    options = parser.parse_args()
    # The prediction and the measurement of an experiment share a file.
    name = options.experiment.replace("predict-", "law-")
    record = Record(RESULTS / f"{name}.jsonl", 0.0 if options.show else options.minutes)
    try:
        text = EXPERIMENTS[options.experiment](record)
    except OutOfTimeError:
        print(f"{options.experiment}: {len(record)} runs so far, {record.seconds / 60:.1f} minutes; not complete")
        return 1
    print(text)
    return int(rows.UNFINISHED in text)


if __name__ == "__main__":
    sys.exit(main())

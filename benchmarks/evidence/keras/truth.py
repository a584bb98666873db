"""Run the cases of benchmarks/evidence/keras/main.py in one process without multiring.

The process reads cases from stdin and writes their results to stdout.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
from benchmarks.evidence.keras.callbacks import callbacks, drawn_callbacks
from benchmarks.evidence.keras.programs import Api, drawn_features, gans, structures, train

Random = np.random.Generator
KINDS = ("training", "structures", "gans", "callbacks")


def features_of(kind: str, random: Random) -> list[str]:
    """Return the features of a case."""
    if kind == "training":
        return drawn_features(random, keras.backend.backend())
    if kind == "callbacks":
        return drawn_callbacks(random, keras.backend.backend())
    return []


def result_of(kind: str, random: Random, features: list[str], api: Api, folder: Path) -> dict[str, Any]:
    """Return the result of a case, or {"raised": ...} if the case raises."""
    runs: dict[str, Any] = {
        "training": lambda: train(random, api, features),
        "structures": lambda: structures(random, api, features),
        "gans": lambda: gans(random, api, features),
        "callbacks": lambda: callbacks(random, api, features, folder),
    }
    try:
        found: dict[str, Any] = runs[kind]()
    except Exception as error:  # noqa: BLE001 -- what a program raises is its result
        lines = traceback.format_exception(error)
        return {"raised": f"{type(error).__name__}: {str(error)[:300]}", "where": "".join(lines)[-1500:]}
    return found


def drawn(kind: str, entropy: list[int]) -> tuple[Random, list[str]]:
    """Return the generator and the features of a case, the same in every process."""
    random = np.random.default_rng(entropy)
    return random, features_of(kind, random)


def main() -> None:
    """Answer each line of stdin with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # sends the libraries' output to stderr, away from the answers
    for line in sys.stdin:
        kind, entropy = json.loads(line)
        random, features = drawn(kind, entropy)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(result_of(kind, random, features, Api(), Path(folder))), file=answers, flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    main()

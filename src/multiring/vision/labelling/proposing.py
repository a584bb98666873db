"""The process that proposes labels: python -m multiring.vision.labelling.proposing FOLDER RUN FILE.

It adds a line to FILE for each picture that has no labels. It ends when its standard input ends.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch

from multiring.errors import DataError, MultiringError, UnsupportedError
from multiring.vision.labelling.proposals import lines_of
from multiring.vision.labels import to_json
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.vision_model import load_model
from multiring.vision.pictures import read_picture
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.scanning import RUNS


def propose(folder: Path, run: str, file: Path) -> None:
    """Add what the model of a run proposes for the project's pictures without labels to a file of proposals.

    Raises:
        DataError: the model cannot be read.
        UnsupportedError: the model needs clips, not pictures.
    """
    model = load_model(folder / RUNS / run)
    if model.description.kind == "act":
        raise UnsupportedError(f"the model of run {run!r} sees clips of frames: want one that sees pictures")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as written:
        written.seek(0)
        data = written.read()
        done = {told["digest"] for told in lines_of(data)}
        if data and not data.endswith(b"\n"):
            written.write(b"\n")  # what a killed process left of a line stays alone
        with VisionProject.open(folder) as project:
            classes = set(project.classes())
            for image in project.summaries():
                is_usable = not image.problem and not image.is_missing
                if image.labels is not None or not is_usable or image.digest in done:
                    continue
                try:
                    picture = read_picture(folder / image.path)
                except DataError:
                    continue  # the file changed since the scan, which will name it
                with torch.inference_mode():
                    found = predictions_of(model.description, model(torch.from_numpy(picture.pixels)[None]))[0]
                pairs = [
                    (label, score)
                    for label, score in zip(found.labels, found.scores, strict=True)
                    if label.class_name in classes  # the others were deleted or renamed since the training
                ]
                line = {
                    "digest": image.digest,
                    "labels": [to_json(label) for label, _ in pairs],
                    "scores": [round(float(score), 4) for _, score in pairs],
                    "confidence": round(float(found.confidence), 6),
                }
                written.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                written.flush()
                done.add(image.digest)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Run the process and return its exit code."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    torch.set_num_threads(1)  # the other cores are the page's
    folder, run, file = arguments
    try:
        propose(Path(folder), run, Path(file))
    except MultiringError as error:
        print(error, file=sys.stderr)  # noqa: T201 -- a program
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

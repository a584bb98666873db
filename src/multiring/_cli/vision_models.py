"""The actions of `multiring vision` that use a trained model: export-model and predict.

They import torch, onnxruntime and OpenCV, which take seconds, only when they run.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multiring._cli.output import counted, show
from multiring.errors import ArgumentError
from multiring.vision.project.folder import VisionProject


def add_actions(actions: Any) -> None:
    """Declare the actions' arguments."""
    exporting = _action(actions, "export-model", "write the model of a run as an ONNX file, if it answers as the model")
    exporting.add_argument("folder", type=Path, help="the project's folder")
    exporting.add_argument("run", help="the name of the run in the folder's runs")
    exporting.add_argument("--out", type=Path, metavar="FILE", help="the file (default: model.onnx of the run)")
    exporting.add_argument("--part", default="val", help="the part of the split to compare on (default val)")
    predicting = _action(actions, "predict", "answer for pictures and videos; also under `multiring run`")
    predicting.add_argument("model", type=Path, help="an exported model.onnx, or a run's folder, which torch runs")
    predicting.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help="pictures, folders and videos")
    predicting.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write, a new one")
    predicting.add_argument("--format", default="jsonl", choices=("jsonl", "coco"), help="jsonl (default) or coco")
    predicting.add_argument("--every", type=int, default=1, metavar="N", help="of videos, each Nth frame (default 1)")
    predicting.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a rank's model (default 1)")


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser


def _export_model(arguments: argparse.Namespace) -> int:
    from multiring.vision.exporting.runs import GRAPH, export_run  # noqa: PLC0415 -- see above

    with VisionProject.open(arguments.folder) as project:
        made = export_run(project, arguments.run, path=arguments.out, part=arguments.part)
        place = arguments.out or project.runs / arguments.run / GRAPH
    figures = made.parity
    if arguments.json:
        show(json.dumps({"file": str(place), **asdict(made)}, ensure_ascii=False))
        return 0
    compared = f"{counted(figures['pictures'], 'picture')} of the part {figures['part']}"
    metrics = f"metric {figures['metric_of_export']:.2f} %, of the model {figures['metric_of_model']:.2f} %"
    show(f"{compared}: {figures['equal_answers']:.2%} of the answers equal, {metrics}: {place}")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    if arguments.threads < 1:
        raise ArgumentError(f"--threads {arguments.threads}: want at least 1")
    import multiring  # noqa: PLC0415 -- its import of this module would be a cycle
    from multiring.vision.predicting.predicting import predict  # noqa: PLC0415 -- see above
    from multiring.vision.predicting.predictors import Predictor  # noqa: PLC0415 -- see above

    predictor = Predictor.open(arguments.model, threads=arguments.threads)
    group = multiring.init()
    try:
        done = predict(
            group,
            predictor,
            arguments.inputs,
            arguments.out,
            file_format=arguments.format,
            every=arguments.every,
        )
        is_first = group.rank == 0
    finally:
        multiring.shutdown()
    if not is_first:
        return 0
    for each in done.problems:
        print(f"unreadable: {each}", file=sys.stderr)
    if arguments.json:
        show(json.dumps({"file": str(arguments.out), **asdict(done)}, ensure_ascii=False))
        return 0
    resumed = f", {counted(done.resumed, 'chunk')} from an earlier start" if done.resumed else ""
    show(f"{counted(done.pictures, 'picture')}, {len(done.problems)} unreadable{resumed}: {arguments.out}")
    return 0


ACTIONS = {"export-model": _export_model, "predict": _predict}

"""The actions of `multiring vision` that use a trained model: export-model, predict and serve.

They import torch, onnxruntime, OpenCV and Starlette, which take seconds, only when they run.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multiring._cli.number_option import COUNT, MOST_BYTES, MOST_RANKS, PAUSE, RANKS, SECONDS, NumberOption, whole
from multiring._cli.output import counted, show
from multiring.errors import ArgumentError
from multiring.vision.project.folder import VisionProject


def add_actions(actions: Any) -> None:
    """Declare the actions' arguments."""
    exporting = add_action(
        actions, "export-model", "write the model of a run as an ONNX file, if it answers as the model"
    )
    exporting.add_argument("folder", type=Path, help="the project's folder")
    exporting.add_argument("run", help="the name of the run in the folder's runs")
    exporting.add_argument("--out", type=Path, metavar="FILE", help="the file (default: model.onnx of the run)")
    exporting.add_argument("--part", default="val", help="the part of the split to compare on (default val)")
    predicting = add_action(actions, "predict", "answer for pictures and videos; also under `multiring run`")
    predicting.add_argument("model", type=Path, help="an exported model.onnx, or a run's folder, which torch runs")
    predicting.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help="pictures, folders and videos")
    predicting.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write, a new one")
    predicting.add_argument("--format", default="jsonl", choices=("jsonl", "coco"), help="jsonl (default) or coco")
    predicting.add_argument("--every", type=COUNT, default=1, metavar="N", help="of videos, each Nth frame (default 1)")
    predicting.add_argument(
        "--threads", type=RANKS, default=1, metavar="N", help="threads of a rank's model (default 1)"
    )

    serving = add_action(actions, "serve", "answer over HTTP by the Open Inference Protocol, and for pictures")
    serving.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="FILE, NAME=FILE, NAME:VERSION=FILE, or a folder with NAME/VERSION/model.onnx",
    )
    serving.add_argument("--host", default="127.0.0.1", help="the address (default 127.0.0.1); others need --tokens")
    serving.add_argument(
        "--port", type=whole(0, 65_535), default=8000, help="the port (default 8000); 0 takes a free one"
    )
    serving.add_argument("--tokens", type=Path, metavar="FILE", help="a file with a token a line; clients need one")
    serving.add_argument(
        "--threads", type=whole(0, MOST_RANKS), default=0, metavar="N", help="threads of a model (default: the cores)"
    )
    for option, (kind, name, text) in _LIMITS.items():
        metavar = "SECONDS" if kind.kind is float else "N"
        serving.add_argument(option, type=kind, dest=name, metavar=metavar, help=text)


_BYTES = whole(1, MOST_BYTES)
# The options of `serve` for its limits: the type, the field of ServerLimits, and the help.
_LIMITS: dict[str, tuple[NumberOption, str, str]] = {
    "--batch": (COUNT, "batch", "the most pictures of a batch and of a request (default 16)"),
    "--delay": (PAUSE, "delay_s", "how long a request waits for others while the model is idle (default 0)"),
    "--body-bytes": (_BYTES, "body_bytes", "the largest body (default 32 MiB)"),
    "--pixels": (_BYTES, "pixels", "the most pixels of a picture (default 33554432)"),
    "--requests": (COUNT, "requests", "the most requests at a time; others get 429 (default 128)"),
    "--memory-bytes": (_BYTES, "memory_bytes", "the most bytes that requests hold; others get 429 (default 512 MiB)"),
    "--time": (SECONDS, "time_s", "the longest time of a request; a slower one gets 503 (default 30)"),
}


def add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Declare an action whose result can be printed as JSON, and return its parser."""
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
    metrics = (
        f"{figures['metric']} {figures['metric_of_export']:.2f} %, of the model {figures['metric_of_model']:.2f} %"
    )
    show(f"{compared}: {figures['equal_answers']:.2%} of the answers equal, {metrics}: {place}")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
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
    answered = counted(done.pictures, "video" if predictor.takes_clips else "picture")
    show(f"{answered}, {len(done.problems)} unreadable{resumed}: {arguments.out}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from multiring._web.bearer_tokens import BearerTokens  # noqa: PLC0415 -- see above
    from multiring._web.loopback import is_loopback  # noqa: PLC0415 -- see above
    from multiring.vision.serving.application import InferenceServer  # noqa: PLC0415 -- see above
    from multiring.vision.serving.limits import ServerLimits  # noqa: PLC0415 -- see above
    from multiring.vision.serving.repository import open_repository  # noqa: PLC0415 -- see above
    from multiring.vision.serving.server import serve  # noqa: PLC0415 -- see above

    if arguments.tokens is None and not is_loopback(arguments.host):
        raise ArgumentError(f"--host {arguments.host} lets other hosts connect: give --tokens FILE too")
    given = {name: getattr(arguments, name) for _, name, _ in _LIMITS.values()}
    limits = ServerLimits(**{name: value for name, value in given.items() if value is not None})
    tokens = BearerTokens(arguments.tokens) if arguments.tokens else None
    repository = open_repository(arguments.models, threads=arguments.threads)
    inference = InferenceServer(repository, limits, tokens=tokens, only_local_names=tokens is None)
    if not arguments.json:
        for each in repository:
            show(f"{each.name}, version {each.version}: {each.session.model.kind}")
    serve(inference, limits, arguments.host, arguments.port, show)
    return 0


ACTIONS = {"export-model": _export_model, "predict": _predict, "serve": _serve}

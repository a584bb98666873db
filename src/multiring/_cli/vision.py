"""multiring vision: check a folder of pictures, label and split it, import and export labels.

The folder is a project: pictures, labels.sqlite with their labels, and runs with results. `check` finds unreadable
pictures, duplicates, labels that contradict each other and more. `split` divides the labelled pictures, and keeps
duplicates and frames of a video on one side. `label` starts a local page to label pictures on, and `frames` makes
pictures of a video. `import` and `export` read and write COCO, VOC, YOLO, CSV, ImageFolder and
PNG masks.

`export-model` writes the model of a run as an ONNX file. `predict` answers for pictures and videos, also on many ranks.
`serve` answers over HTTP.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multiring._cli import vision_models
from multiring._cli.number_option import COUNT, RANKS, SEED, whole
from multiring._cli.output import counted, show, told_files
from multiring.errors import ArgumentError
from multiring.vision.checks.checking import CheckResult, check_project
from multiring.vision.checks.page import write_check_page
from multiring.vision.checks.split_files import make_split
from multiring.vision.formats.exchange import FORMATS, LABELLED, export_labels, import_labels
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.records import ScanResult

_FOUND = 1
_TOLD = 20  # findings of a kind that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = _action(actions, "check", "find unreadable pictures, duplicates and contradicting labels")
    check.add_argument("--out", type=Path, metavar="FILE", help="the HTML page (default: FOLDER/runs/check.html)")
    check.add_argument("--threads", type=RANKS, default=4, metavar="N", help="pictures decoded at a time (default 4)")
    splitting = _action(actions, "split", "divide the labelled pictures for training, validation and test")
    splitting.add_argument(
        "--shares",
        default="train=0.8,val=0.2",
        metavar="NAME=SHARE,...",
        help="parts and their shares (default train=0.8,val=0.2)",
    )
    splitting.add_argument("--seed", type=SEED, default=0, metavar="N", help="another seed, another split (default 0)")
    splitting.add_argument("--name", default="split", help="the split's name (default split)")
    splitting.add_argument(
        "--divide-near",
        action="store_true",
        help="near duplicates may be in two parts: for pictures of one product in one position, which all look alike",
    )
    importing = _action(actions, "import", "take pictures and labels from another program's files")
    importing.add_argument("source", type=Path, help="the folder, or the file of labels")
    importing.add_argument("--format", required=True, choices=list(FORMATS), help="the format of the labels")
    importing.add_argument("--images", type=Path, metavar="DIR", help="the pictures, if the format has them elsewhere")
    importing.add_argument(
        "--labelled", choices=LABELLED, help="pictures that have other labels already keep these, or get the new ones"
    )
    importing.add_argument("--author", default="import", help="who is responsible for the labels (default import)")
    exporting = _action(actions, "export", "write the labelled pictures and their labels for another program")
    exporting.add_argument("target", type=Path, help="the folder to make")
    exporting.add_argument("--format", required=True, choices=list(FORMATS), help="the format of the labels")
    exporting.add_argument("--boxes", action="store_true", help="replace polygons and masks by boxes around them")
    text = "train a model on the labelled pictures; FOLDER --help lists the options"
    training = actions.add_parser("train", help=text, description=text, allow_abbrev=False)
    training.add_argument("folder", type=Path, help="the project's folder")
    training.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="the options of the training")
    vision_models.add_actions(actions)
    labelling = _action(actions, "label", "start a local page to label the pictures on")
    labelling.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1)")
    labelling.add_argument(
        "--port", type=whole(0, 65_535), default=8400, help="the port, 0 for a free one (default 8400)"
    )
    labelling.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a secret that browsers must give; other hosts need it"
    )
    framing = _action(actions, "frames", "make pictures of a video's frames")
    framing.add_argument("videos", nargs="+", metavar="VIDEO", help="a video, as a path in the folder")
    framing.add_argument("--every", type=COUNT, default=1, metavar="N", help="only every Nth frame (default 1)")

    scoring = _action(actions, "eval", "score a trained model on a part of its split, as a page with pictures")
    scoring.add_argument("run", help="the run's name in FOLDER/runs")
    scoring.add_argument("--part", default="val", help="the part of the split (default val)")
    scoring.add_argument("--compare", metavar="RUN", help="another run, which is scored on the same pictures")
    scoring.add_argument("--production", action="store_true", help="state that the run is in production, after scoring")


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser = vision_models.add_action(actions, name, text)
    parser.add_argument("folder", type=Path, help="the project's folder")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Return 1 if `check` found an error, else 0."""
    acts = {"check": _check, "split": _split, "import": _import, "export": _export, "train": _train, "eval": _eval}
    acts |= {"label": _label, "frames": _frames}
    with told_files():
        return {**acts, **vision_models.ACTIONS}[arguments.action](arguments)


def _opened(folder: Path) -> VisionProject:
    """Open a project. A folder that is none becomes one."""
    if not folder.is_dir():
        raise ArgumentError(f"{str(folder)!r} is no folder: want the folder with the pictures")
    return VisionProject.open(folder) if VisionProject.is_project(folder) else VisionProject.create(folder)


def _check(arguments: argparse.Namespace) -> int:
    with _opened(arguments.folder) as project:
        scan = project.scan(threads=arguments.threads)
        result = check_project(project, scan)
        page = arguments.out or project.runs / "check.html"
        write_check_page(page, project.folder, result)
    if arguments.json:
        show(json.dumps({**asdict(result), "page": str(page), "scan": asdict(scan)}, ensure_ascii=False))
    else:
        _tell(result, scan)
        show(f"with pictures: {page}")
    return _FOUND if result.has_errors else 0


def _tell(result: CheckResult, scan: ScanResult) -> None:
    news = [
        counted(len(found), what)
        for what, found in (
            ("new picture", scan.added),
            ("changed picture", scan.changed),
            ("moved picture", scan.moved),
        )
        if found
    ]
    if news:
        show(", ".join(news))
    usable = f"{result.usable} usable, {result.labelled} labelled, {result.empty} with nothing in them"
    show(f"{counted(result.pictures, 'picture')}: {usable}")
    for name, count in result.classes.items():
        show(f"class {name}: {counted(count, 'picture')}")
    counts = Counter(each.kind for each in result.findings)
    told: Counter[str] = Counter()
    for each in result.findings:
        told[each.kind] += 1
        if told[each.kind] <= _TOLD:
            show(f"{each.severity}: {each.kind}: {each.text}")
        elif told[each.kind] == counts[each.kind]:
            show(f"{each.severity}: {each.kind}: {counts[each.kind] - _TOLD} more")
    if not result.findings:
        show("nothing was found")


def _split(arguments: argparse.Namespace) -> int:
    shares = _shares(arguments.shares)
    with _opened(arguments.folder) as project:
        project.scan()
        made = make_split(project, shares, seed=arguments.seed, name=arguments.name, divide_near=arguments.divide_near)
        place = project.runs / "splits" / f"{made.name}.json"
    if arguments.json:
        show(json.dumps(asdict(made), ensure_ascii=False))
        return 0
    for part, paths in made.parts.items():
        show(f"{part}: {counted(len(paths), 'picture')}")
    show(f"{counted(made.units, 'group')} that stay together, digest {made.digest[:16]}: {place}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with _opened(arguments.folder) as project:
        done = import_labels(
            project,
            arguments.source,
            arguments.format,
            arguments.author,
            pictures=arguments.images,
            labelled=arguments.labelled or "",
        )
    if arguments.json:
        show(json.dumps(asdict(done)))
        return 0
    text = f"{counted(done.pictures, 'picture')}, {done.copied} of them copied, {counted(done.labels, 'label')}"
    if done.repeated:
        text += f"; {counted(done.repeated, 'label')} given again for a picture, equal in every field, left out"
    show(f"{text}; {counted(done.left_out, 'other picture')} without labels left out" if done.left_out else text)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    with VisionProject.open(arguments.folder) as project:
        project.scan()
        made = export_labels(project, arguments.target, arguments.format, boxes=arguments.boxes)
    counts = {
        "pictures": len(made.pictures),
        "labels": sum(len(each.labels) for each in made.pictures),
        "classes": len(made.classes),
    }
    pictures, labels = counted(counts["pictures"], "picture"), counted(counts["labels"], "label")
    text = f"{pictures}, {labels}, {counts['classes']} class{'' if counts['classes'] == 1 else 'es'}: "
    text += str(arguments.target)
    show(json.dumps({**counts, "target": str(arguments.target)}, ensure_ascii=False) if arguments.json else text)
    return 0


def _train(arguments: argparse.Namespace) -> int:
    # Only training needs torch, and to import it takes seconds.
    from multiring.vision.fitting.train_command import train_command  # noqa: PLC0415

    train_command(arguments.folder, arguments.words)
    return 0


def _label(arguments: argparse.Namespace) -> int:
    # Only the page needs starlette and uvicorn.
    from multiring.vision.labelling.server import serve_page  # noqa: PLC0415

    with _opened(arguments.folder) as project:
        scan = project.scan()
        pictures = len(project.summaries())

    def ready(address: str) -> None:
        if arguments.json:
            show(json.dumps({"address": address, "pictures": pictures, "scan": asdict(scan)}, ensure_ascii=False))
        else:
            show(f"{counted(pictures, 'picture')}; label them at {address} (Ctrl-C ends the page)")

    serve_page(arguments.folder, arguments.host, arguments.port, arguments.token_file, ready)
    return 0


def _frames(arguments: argparse.Namespace) -> int:
    from multiring.vision.labelling.frames import make_frames  # noqa: PLC0415 -- a part of the page

    all_made: list[str] = []
    with _opened(arguments.folder) as project:
        for video in arguments.videos:
            made = make_frames(project, video, arguments.every)
            all_made += made
            if not arguments.json:
                show(f"{counted(len(made), 'frame')} of {video}")
    if arguments.json:
        show(json.dumps({"frames": all_made}))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from multiring.vision.scoring.production import set_production  # noqa: PLC0415 -- as in _train
    from multiring.vision.scoring.score_page import write_score_page  # noqa: PLC0415
    from multiring.vision.scoring.scored_runs import score_run  # noqa: PLC0415

    names = [arguments.run, *([arguments.compare] if arguments.compare else [])]
    scores = [score_run(arguments.folder, name, arguments.part) for name in names]
    page = write_score_page(arguments.folder, *scores)
    if arguments.production:
        set_production(arguments.folder, arguments.run)
    if arguments.json:
        show(json.dumps({"page": str(page), "scores": [asdict(each) for each in scores]}, ensure_ascii=False))
        return 0
    for each in scores:
        figures = ", ".join(f"{name} {value:.2f} %" for name, value in each.figures.items())
        show(f"{each.run}, {counted(len(each.samples), 'sample')} of {each.part}: {figures}")
    show(f"with pictures: {page}")
    return 0


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for each in text.split(","):
        name, is_given, share = each.partition("=")
        is_given = "" if name.strip() in shares else is_given
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            is_given = ""
        if not is_given or not name.strip():
            raise ArgumentError(f"--shares {text!r}: want NAME=SHARE,..., such as train=0.8,val=0.2")
    return shares

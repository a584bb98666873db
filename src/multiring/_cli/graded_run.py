"""multiring simulate --against: grade the prediction of a step against a recorded run."""

import argparse
import json
from dataclasses import asdict

from multiring._cli.output import show, show_table
from multiring._cli.simulation import cluster_of, subject_of
from multiring._diagnosis.recorded_steps import read_steps
from multiring._diagnosis.step_grades import PartGrade, grades_of, score_of
from multiring._simulator.step import part_of, step_of
from multiring._topology import Topology
from multiring.errors import ArgumentError

_HEAD = ("part", "predicted", "measured", "error")
_MS = 1e3


def show_graded_run(arguments: argparse.Namespace) -> int:
    """Print the grade of each part of the step, and return 0."""
    if not arguments.profile:
        raise ArgumentError("--against grades the prediction of a script: want --profile FILE, of another run")
    for option in ("--ranks", "--sweep", "--noise-scale", "--least-samples"):
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise ArgumentError(f"--against predicts the step of its timeline alone: leave out {option}")
    recorded = read_steps(arguments.against)
    known, topology = (None, Topology(recorded.hosts)) if arguments.topology is None else cluster_of(arguments.topology)
    subject = subject_of(arguments, known)
    step = step_of(
        subject.profile(recorded.ranks, subject.batch_per_rank, subject.exchange), part_of(topology, recorded.ranks)
    )
    grades = grades_of(step, recorded, takes_hosts=arguments.topology is None)
    if arguments.json:
        rows = [{**asdict(each), "source": "input" if each.is_input else "predicted"} for each in grades]
        described = {"steps": recorded.steps, **subject.described, "parts": rows, "score": score_of(grades)}
        show(json.dumps(described, indent=1))
        return 0
    show(f"{subject.title}, on {recorded.ranks} ranks, against {recorded.steps} steps of {arguments.against}")
    show_table([_HEAD, *map(_cells, grades)])
    show(f"Mean error of the predicted parts: {score_of(grades):.1%}.")
    if arguments.topology is None:
        show("The links have built-in constants: multiring probe measures those of a cluster, for --topology FILE.")
    return 0


def _cells(grade: PartGrade) -> tuple[str, str, str, str]:
    def told(value: float) -> str:
        return f"{value * _MS:.4g} ms" if grade.unit == "s" else f"{value:.0f} {grade.unit}".rstrip()

    error = "input" if grade.error is None else f"{grade.error:.1%} of {grade.of}"
    return grade.part, told(grade.predicted), told(grade.measured), error

"""multiring bench all_reduce --device cuda: time all-reduces of CUDA tensors."""

import argparse
import importlib.util
import json
import sys

from multiring._bench.cases import Question, parse_size
from multiring._bench.compare import Manner
from multiring._bench.job import Jobs
from multiring._bench.on_device import COLLECTIVES, PEERS, DeviceBench
from multiring._bench.records import lines_of, records_of, settings_lines
from multiring._cli import bench_lab
from multiring._cli.output import show
from multiring.errors import ArgumentError, LaunchError

DEVICES = ("cpu", "cuda")
_SIZES = "1KiB,32KiB,1MiB,16MiB,64MiB,256MiB"
_SECONDS = 0.1
_OF_THE_HOST = ("hosts", "no_one", "together", "plot")  # options that say nothing about device memory


def run(arguments: argparse.Namespace) -> int:
    """Time all-reduces of CUDA tensors, print the results, and return 0.

    Raises:
        MultiringError: DeviceBench.compare failed, or an argument is invalid.
    """
    if arguments.kind not in COLLECTIVES:
        raise ArgumentError(f"{arguments.kind} --device cuda: only {', '.join(COLLECTIVES)} is timed on GPUs")
    for name in _OF_THE_HOST:
        if getattr(arguments, name):
            raise ArgumentError(f"--{name.replace('_', '-')} does not go with --device cuda: omit one of them")
    ranks = bench_lab.ranks_of(arguments, None)
    sizes = (_SIZES if arguments.sizes is None else arguments.sizes).split(",")
    questions = [
        Question(
            collective=arguments.kind,
            ranks=ranks,
            size_bytes=parse_size(text),
            dtype=arguments.dtype,
            op=arguments.op,
            device=arguments.device,
        )
        for text in sizes
    ]
    against = bench_lab.against_of(arguments)
    manner = Manner(
        alternations=arguments.alternations,
        calls=arguments.calls,
        seconds=_SECONDS if arguments.seconds is None else arguments.seconds,
    )
    jobs = Jobs(arguments.deadline_s)
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"there is no torch for CUDA tensors; install it with: {sys.executable} -m pip install torch")
    bench = DeviceBench(jobs, manner, PEERS if against is None else against)
    circumstances = bench_lab.circumstances_of(None)
    if not arguments.json:
        show("\n".join(circumstances.lines()))
    with jobs:
        made = bench.compare(questions)
    for comparison in made:
        if arguments.json:
            show("\n".join(json.dumps(record) for record in records_of(comparison, circumstances)))
        else:
            show("\n".join(["", *lines_of(comparison)]))
    if not arguments.json:
        show("\n".join(settings_lines(made[-1].timings)))
    return 0

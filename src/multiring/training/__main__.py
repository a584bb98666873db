"""Write the report of a run: python -m multiring.training RUN."""

import argparse
from pathlib import Path

from multiring.training import report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m multiring.training", description="Write a run's report.")
    parser.add_argument("folder", type=Path, help="the folder of the run")
    print(report.write(parser.parse_args().folder))  # noqa: T201 -- a command

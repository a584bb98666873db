"""Write the report of a run: python -m multiring.training RUN."""

import argparse
import sys
from pathlib import Path

from multiring.errors import MultiringError
from multiring.training import write_report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m multiring.training", description="Write a run's report.")
    parser.add_argument("folder", type=Path, help="the folder of the run")
    try:
        print(write_report(parser.parse_args().folder))  # noqa: T201 -- a command
    except MultiringError as error:
        sys.exit(f"multiring.training: {error}")

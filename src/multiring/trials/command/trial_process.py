"""The process of a trial: `multiring run`, which ends with the process that holds the study.

Usage: `python -m multiring.trials.command.trial_process PARENT WORDS...`, by `multiring trials run` only.
"""

import runpy
import sys

from multiring._launch.rank_starts import dying_with

if __name__ == "__main__":
    dying_with(int(sys.argv[1]))()
    sys.argv = ["multiring", *sys.argv[2:]]
    runpy.run_module("multiring", run_name="__main__", alter_sys=False)

"""End labs in every way at every moment, and check that nothing remains.

    sudo .venv/bin/python benchmarks/evidence/lab/main.py [--endings 50] [--starts 10]

For each way to end a lab, the program prints the number of labs, the time until nothing remained, and the remains. Then
it prints the time to start eight hosts. The exit code is 1 if anything remained, or if eight hosts took more than 5
seconds.
"""

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import time
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.lab_rig import ENDINGS, end

from multiring.lab import Lab, LabPlan, parse_rate

LEFT_S = 5.0
UP_S = 5.0


def main() -> int:
    """Run the endings, then the starts."""
    # A background process (nohup, a shell's &) ignores these signals, and its children inherit that. But the labs
    # must end on these signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endings", type=int, default=50, help="number of labs to end")
    parser.add_argument("--starts", type=int, default=10, help="number of starts of eight hosts")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    left = end_labs(arguments.endings)
    slowest = start_labs(arguments.starts)
    return 1 if left or slowest > UP_S else 0


def end_labs(count: int) -> int:
    """End `count` labs; return the number of labs that left something."""
    moments = random.Random(1)  # noqa: S311 -- the same moments in every run
    gone_s: dict[str, list[float]] = {ending: [] for ending in ENDINGS}
    bad = 0
    for ending in islice(cycle(ENDINGS), count):
        lab = end(ending, delay_s=moments.uniform(0.0, 0.8))
        begin = time.monotonic()
        left = lab.left_after(LEFT_S)
        gone_s[ending].append(time.monotonic() - begin)
        if left:
            bad += 1
            print(f"{ending}: {len(left)} left: {'; '.join(left)}")
        lab.close()
    print(f"{'ended':<30}{'times':>6}{'median s until nothing is left':>32}{'longest':>9}")
    for ending, seconds in gone_s.items():
        if seconds:
            print(f"{ending:<30}{len(seconds):>6}{statistics.median(seconds):>32.3f}{max(seconds):>9.3f}")
    print(f"{count} labs, {bad} left something")
    return bad


def start_labs(count: int) -> float:
    """Start a lab of eight hosts `count` times; return the longest start in seconds."""
    rails = (parse_rate("1gbit"), parse_rate("250mbit"))
    plan = LabPlan(hosts=8, rails=rails, racks=2, uplink=parse_rate("500mbit"))
    up_s, down_s = [], []
    for _ in range(count):
        begin = time.monotonic()
        with Lab(plan):
            up_s.append(time.monotonic() - begin)
            begin = time.monotonic()
        down_s.append(time.monotonic() - begin)
    print(
        f"8 hosts, 2 rails, 2 racks: up in {statistics.median(up_s):.3f} s (longest {max(up_s):.3f}), "
        f"down in {statistics.median(down_s):.3f} s (longest {max(down_s):.3f}), n = {count}"
    )
    return max(up_s)


if __name__ == "__main__":
    sys.exit(main())

"""A link of the lab gets another speed: the old bucket is removed with the packets that wait in it."""

import random
from typing import Any

import pytest

from multiring.lab.network import _shape


class Qdisc:
    """A queueing discipline as pyroute2 returns it."""

    def __init__(self, burst: int) -> None:
        self.burst = burst

    def get_attr(self, name: str) -> str | None:
        return "tbf" if name == "TCA_KIND" else None


class Kernel:
    """The kernel's token bucket, in which a waiting packet larger than the bucket waits forever."""

    def __init__(self) -> None:
        self.bucket: Qdisc | None = None
        self.waiting = 0

    def get_qdiscs(self, index: int) -> list[Qdisc]:
        assert index == 7
        return [] if self.bucket is None else [self.bucket]

    def tc(self, act: str, kind: str = "", index: int = 0, **options: Any) -> None:
        assert index == 7
        if act == "del":
            self.bucket, self.waiting = None, 0
        else:
            assert (act, kind) == ("replace", "tbf")
            self.bucket = Qdisc(options["burst"])


@pytest.mark.parametrize("seed", range(10))
def test_no_change_of_speed_stops_a_link(seed: int) -> None:
    draw, kernel = random.Random(seed), Kernel()  # noqa: S311 -- of a test
    for _ in range(20):
        rate = draw.choice([None, *(10**6 * draw.randrange(1, 2000) for _ in range(6))])
        _shape(kernel, 7, rate)
        assert (kernel.bucket is None) == (rate is None)
        if kernel.bucket is not None:
            assert kernel.waiting <= kernel.bucket.burst, "a packet waits forever"
            kernel.waiting = min(kernel.bucket.burst, 65536)

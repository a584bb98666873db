"""Chainer: each name of ChainerMN's interface works, or an error names it.

ChainerMN's own helpers also run over multiring's communicator.
"""

import pytest
from tests.support.conforming import jobs
from tests.support.conforming.homes import FRAMEWORKS
from tests.support.ranks import report_of

CHAINER = FRAMEWORKS["chainer"]


def test_chainermns_interface_is_served() -> None:
    if CHAINER.missing():
        pytest.skip(CHAINER.missing())
    report = report_of(jobs.elsewhere, 3, "tests.support.chainer_ranks", "everything", home=CHAINER.home)
    failed = [(each.rank, each.error, each.output) for each in report.outcomes if each.error or each.exit_code]
    assert not failed, failed
    counts = report.outcomes[0].value
    assert counts == {"names": 75, "served": 75}
    print(f"ChainerMN's interface: {counts['served']} of {counts['names']} names are served")  # noqa: T201

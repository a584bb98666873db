"""Each framework's adapter passes the conformance suite."""

from pathlib import Path

import pytest
from tests.support.conforming import jobs
from tests.support.conforming.homes import FRAMEWORKS
from tests.support.faults import kill
from tests.support.frameworks_page import PAGE, PASSED, cells_of
from tests.support.ranks import report_of

from multiring.adapters import conformance

PATIENCE_S = 60.0  # the required limit is 5 s; a loaded machine needs more


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_conforms(name: str, tmp_path: Path) -> None:
    framework = FRAMEWORKS[name]
    if framework.missing():
        pytest.skip(framework.missing())
    module, home = framework.module, framework.home
    report = report_of(jobs.suite, 3, module, home=home, deadline_s=240)
    assert not [each.error for each in report.outcomes if each.error], report.outcomes[0].output
    _, _, results = report.outcomes[0].value
    assert [each.value for each in report.outcomes] == [report.outcomes[0].value] * 3
    assert [check for check, _, _ in results] == list(conformance.CHECKS)
    assert not [(check, text) for check, outcome, text in results if outcome == "failed"]
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    skipped = {check: text for check, outcome, text in results if outcome == "skipped"}
    assert {check for check in conformance.CHECKS if cells[check, name] != PASSED} == set(skipped), (
        "docs/frameworks.md is outdated; run tests/support/frameworks_page.py"
    )
    for check, text in skipped.items():
        print(f"{name}: {check} is not tried: {text}")  # noqa: T201 -- the page has the count
    # All adapters share the core, which reports a lost rank to all survivors. Three ranks of the toy test that. For a
    # framework, one survivor suffices: it tests that the adapter raises the core's error.
    ranks = 3 if name == "toy" else 2
    faults = [kill(1).at("at work").after(0.2)]
    report = report_of(jobs.lose_a_rank, ranks, module, None, home=home, faults=faults, deadline_s=240)
    wanted = [True, False, True][:ranks]
    assert [each.value is not None and each.value < PATIENCE_S for each in report.outcomes] == wanted
    report = report_of(jobs.lose_a_rank, ranks, module, 1, home=home, deadline_s=240)
    assert isinstance(report.outcomes[1].error, ArithmeticError)
    assert [each.value is not None and each.value < PATIENCE_S for each in report.outcomes] == wanted
    report = report_of(jobs.be_interrupted, 2, module, str(tmp_path / "over"), home=home, deadline_s=240)
    assert report.outcomes[0].error is None, report.outcomes[0].output
    assert 0 < report.outcomes[0].value < PATIENCE_S

"""The page of a study in a browser: two widths, hostile names, values that are not finite."""

import math

import optuna
import pytest
from playwright.sync_api import Browser

from multiring.trials.page import write_page
from multiring.trials.storage import COMMAND, JUDGED, RANKS, REASON

HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[str, float]]:
    """Return the page's address, and the most important parameter as Optuna computes it."""
    folder = tmp_path_factory.mktemp("study")
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.log")),
    )
    study = optuna.create_study(
        storage=storage, study_name=f"digits {HOSTILE}", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    study.set_user_attr(COMMAND, ["python", "train.py", "--rate", "{rate}", "--long-option-of-a-script={kind}"])
    for number in range(12):
        trial = study.ask(
            {
                "rate": optuna.distributions.FloatDistribution(1e-5, 0.1, log=True),
                "kind": optuna.distributions.CategoricalDistribution(["a", HOSTILE, "x" * 60]),
                "layers": optuna.distributions.IntDistribution(1, 8),
                **{f"more{at}": optuna.distributions.FloatDistribution(0.0, 1.0) for at in range(4)},
            }
        )
        trial.set_user_attr(RANKS, [0, 1])
        loss = abs(math.log10(trial.params["rate"]) + 3) + 0.01 * trial.params["layers"]
        for step in range(5):
            trial.report(math.nan if number == 3 and step == 2 else loss + 1 / (1 + step), step)
        if number == 3:
            trial.set_user_attr(REASON, f"rank 1: ValueError: {HOSTILE}")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif number == 4:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, math.inf if number == 5 else loss)
    study.set_user_attr(JUDGED, {"trial": study.best_trial.number, "seeds": [7, 8], "words": [], "values": [1.25, 1.5]})
    path = write_page(str(folder / "study.log"), None, folder / "page.html")
    return path.as_uri(), next(iter(optuna.importance.get_param_importances(study).items()))


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_shows_the_study(browser: Browser, written: tuple[str, tuple[str, float]], width: int) -> None:
    address, first = written
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.set_default_timeout(200_000)
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda told: errors.append(str(told)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    assert errors == []
    assert [each for each in requests if not each.startswith("data:")] == [address]
    assert page.title() == f"digits {HOSTILE} - multiring trials"
    assert page.locator("img").count() == 0
    assert "12 trials, to minimize: 10 complete, 1 failed, 1 pruned" in page.locator("#counts").inner_text()
    best = page.locator("#best").inner_text()
    assert "multiring run -n 2 -- python train.py --rate " in best
    assert "seed 7: 1.25, seed 8: 1.5" in best
    assert page.locator("#curves path").count() == 12
    assert page.locator("#parallel path").count() == 9  # the infinite value has no place
    assert page.locator("#curves path.best").count() == page.locator("#parallel path.best").count() == 1
    for path in page.locator("path").all():
        assert "NaN" not in (path.get_attribute("d") or "")
    assert page.locator("#importance .bar").count() == 7
    assert page.locator("#importance .bar").first.inner_text().split() == [first[0], f"{first[1]:.2f}"]
    assert page.locator("#trials tbody tr").count() == 12
    assert f"ValueError: {HOSTILE}" in page.locator("#trials").inner_text()
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0

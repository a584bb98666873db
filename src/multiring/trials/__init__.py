"""Hyper-parameters found on the ranks of one job: trials side by side, sampled and pruned by Optuna.

    def objective(trial):
        return train(rate=trial.params["rate"], batch=trial.params["batch"])

    space = {"rate": {"low": 1e-5, "high": 0.1, "log": True}, "batch": [32, 64]}
    study = multiring.trials.run(objective, space, trials=64)
    print(study.best)

Every rank calls `run`; docs/trials.md has a complete program. Inside an objective, `multiring.size()` and all adapters'
collectives are those of the trial's ranks.
"""

from multiring.trials.command.lines import report
from multiring.trials.population import PopulationMember, run_population
from multiring.trials.results import (
    NoMemberError,
    NoTrialError,
    PopulationResult,
    RoundResult,
    StudyResult,
    TrialResult,
)
from multiring.trials.running import run
from multiring.trials.trial import Trial, TrialPruned, TrialStoppedError

__all__ = [
    "NoMemberError",
    "NoTrialError",
    "PopulationMember",
    "PopulationResult",
    "RoundResult",
    "StudyResult",
    "Trial",
    "TrialPruned",
    "TrialResult",
    "TrialStoppedError",
    "report",
    "run",
    "run_population",
]

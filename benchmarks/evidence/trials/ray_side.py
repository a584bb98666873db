"""Ray Tune's side of beside_ray.py: ray_side.py CASE OUTPUT NUMBERS; it writes its figures to OUTPUT as JSON."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

if TYPE_CHECKING:
    from collections.abc import Callable

_MEMORY = "/dev/shm"  # noqa: S108 -- checkpoints need no disk there
_STORE_BYTES = 200_000_000


def connect(places: int) -> None:
    """Start Ray on this host, without what a study does not need."""
    ray.init(num_cpus=places, include_dashboard=False, log_to_driver=False, object_store_memory=_STORE_BYTES)


def lines_in(folder: Path) -> list[Any]:
    """Return what the trials have written down."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def note(folder: str, *values: Any) -> None:
    """Write a line to the file of this process."""
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def beside(durations: list[float], places: int) -> dict[str, Any]:
    """Run trials of these durations; return when each began and ended, and when the study was called."""
    connect(places)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:

        def train(config: dict[str, Any]) -> None:
            began_s = time.time()
            for step in range(10):
                time.sleep(durations[config["number"]] / 10)
                tune.report({"loss": 1 / (step + 1)})
            note(name, began_s, time.time())

        called_s = time.time()
        tune.Tuner(
            tune.with_resources(train, {"cpu": 1}),
            param_space={"number": tune.grid_search(list(range(len(durations))))},
            tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
            run_config=tune.RunConfig(storage_path=name, verbose=0),
        ).fit()
        return {"called_s": called_s, "spans": lines_in(Path(name))}


class Member(tune.Trainable):  # type: ignore[misc] # Ray has no types here
    """A member of a population, with a model and its optimizer. The second one copies the first one."""

    def setup(self, config: dict[str, Any]) -> None:
        """Make the model and the optimizer."""
        import torch  # noqa: PLC0415 -- in the actors only

        torch.set_num_threads(1)
        self._torch, self._folder, self._ended_s = torch, config["folder"], 0.0
        side = int((config["size_bytes"] / 4 / 3 / 12) ** 0.5)  # as rank.py's: Adam keeps two values a parameter
        self._model = torch.nn.Sequential(*[torch.nn.Linear(side, side) for _ in range(12)])
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=config["rate"])
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._loaded: float | None = None

    @property
    def _number(self) -> int:
        return int(self.trial_id.rpartition("_")[2])

    def _sum(self) -> float:
        values = [float(each.detach().sum()) for each in self._model.parameters()]
        values += [float(each["exp_avg_sq"].sum()) for each in self._optimizer.state.values()]
        return sum(values)

    def step(self) -> dict[str, Any]:
        """Train for a round."""
        began_s = time.time()
        if self._loaded is not None:
            note(self._folder, "copied", began_s - self._ended_s, self._loaded)
            self._loaded = None
        self._optimizer.step()
        time.sleep(0.5)
        self._ended_s = time.time()
        return {"value": float(self._number), "member": self._number}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the model and the optimizer."""
        note(self._folder, "saved", self._number, self._sum())
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._torch.save(state, Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Load what another member has saved."""
        state = self._torch.load(Path(checkpoint_dir) / "state.pt")
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._loaded = self._sum()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take other parameters, so that the actor is used again."""
        del new_config
        return True


class Enough(tune.Stopper):  # type: ignore[misc] # as above
    """Ends all trials after some rounds of the member that copies."""

    def __init__(self, rounds: int) -> None:
        self._left = rounds

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Count a round."""
        del trial_id
        self._left -= result["member"] == 0
        return self.stop_all()

    def stop_all(self) -> bool:
        """Return whether it is enough."""
        return self._left <= 0


def copies(size_bytes: int, rounds: int, places: int) -> dict[str, Any]:
    """Run a population of two members; return for how long the copying one did not train."""
    connect(places)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        tune.Tuner(
            Member,
            param_space={"rate": tune.grid_search([1e-4, 1e-3]), "folder": name, "size_bytes": size_bytes},
            tune_config=tune.TuneConfig(
                metric="value",
                mode="max",
                reuse_actors=True,
                scheduler=PopulationBasedTraining(
                    time_attr="training_iteration",
                    perturbation_interval=1,
                    quantile_fraction=0.5,
                    hyperparam_mutations={"rate": tune.loguniform(1e-4, 1e-3)},
                ),
            ),
            run_config=tune.RunConfig(
                storage_path=name,
                verbose=0,
                stop=Enough(rounds),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            ),
        ).fit()
        lines = lines_in(Path(name))
    saved = {value for what, number, value in lines if what == "saved" and number == 1}
    copied = [(seconds, value) for what, seconds, value in lines if what == "copied"]
    return {
        "seconds": [seconds for seconds, _ in copied],
        "wrong": [value for _, value in copied if value not in saved],
    }


def main() -> None:
    """Run the case of the command line."""
    case, output, numbers = sys.argv[1:]
    cases: dict[str, Callable[..., dict[str, Any]]] = {"beside": beside, "copies": copies}
    found = cases[case](*json.loads(numbers))
    Path(output).write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()

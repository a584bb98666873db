"""Lightning: `torchrun --nproc-per-node 2 examples/distributed/with_lightning.py --backend multiring`.

DDPStrategy takes the backend as an argument.
"""

import json
import os

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from steps import parser  # type: ignore[import-not-found] # beside this file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, CLASSES = 4, 16, 4  # BATCH: samples of one rank


class Classifier(LightningModule):  # type: ignore[misc] # of Any, see pyproject.toml
    """A small network that stores the losses of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a rank's batch."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer for the trainer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train, and print the losses."""
    options = parser().parse_args()

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # noqa: TID251 -- torchrun's
    torch.manual_seed(0)
    model = Classifier()
    inputs = torch.randn(options.steps * BATCH * ranks, FEATURES)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend=options.backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH))
    if trainer.is_global_zero:
        print(json.dumps(model.losses))


if __name__ == "__main__":
    main()

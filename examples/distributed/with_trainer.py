"""Hugging Face's Trainer: `torchrun --nproc-per-node 2 examples/distributed/with_trainer.py --backend multiring`.

The Trainer uses Accelerate, which uses an existing process group. TrainingArguments(ddp_backend=...) does not help: on
CPU the Trainer compares it with the backend that Accelerate chose, and rejects a different one.
"""

import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from steps import parser  # type: ignore[import-not-found] # beside this file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BATCH, SEQUENCE, WORDS = 2, 16, 32  # BATCH: samples of one rank


class Recording(Trainer):  # type: ignore[misc] # of Any, see pyproject.toml
    """A Trainer that stores the losses of all steps without rounding; its own log rounds them."""

    losses: list[float]

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Return the loss of a rank's batch, as Trainer does."""
        loss: Tensor = super().training_step(*arguments, **options)
        self.losses.append(self.accelerator.reduce(loss.detach().clone(), reduction="mean").item())
        return loss


def main() -> None:
    """Train, and print the losses."""
    options = parser().parse_args()

    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    first = torch.randint(WORDS, (options.steps * BATCH * dist.get_world_size(), 1))
    texts = (first + 3 * torch.arange(SEQUENCE)) % WORDS
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        samples = [{"input_ids": text, "labels": text} for text in texts]
        trainer = Recording(model=GPT2LMHeadModel(config), args=arguments, train_dataset=samples)
        trainer.losses = []
        trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps(trainer.losses))
    del trainer  # with its model, before the group; see ddp.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

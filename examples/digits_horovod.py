"""Learn handwritten digits in the way of a program written for Horovod, without a word about multiring.

    multiring run --horovod -n 2 -- python examples/digits_horovod.py

With `--elastic`, it resumes from the last commit when a rank's collective fails, as such programs do.
"""

import argparse

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the usual name
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

HELD_BACK = 360  # test images, a fifth of 1797


class Net(nn.Module):
    """A network of two convolutions, two linear layers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, shape (n, 10), for images of shape (n, 1, 8, 8)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def digits() -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    """Return the training set and the test set; they are the same on all ranks."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    order = torch.from_numpy(np.random.default_rng(2026).permutation(len(labels)))
    rest, held_back = order[HELD_BACK:], order[:HELD_BACK]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(images[held_back], labels[held_back])


def metric_average(value: float, name: str) -> float:
    """Return the mean of `value` over all ranks."""
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def test(model: nn.Module, held_back: Dataset[tuple[Tensor, ...]]) -> tuple[float, float]:
    """Return loss and accuracy on the test set, over all ranks' shares."""
    model.eval()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        held_back, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for images, labels in DataLoader(held_back, batch_size=200, sampler=sampler):
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            right += (output.argmax(dim=1) == labels).sum().item()
    loss, right = loss / len(sampler), right / len(sampler)
    return metric_average(loss, "avg_loss"), metric_average(right, "avg_accuracy")


def optimizer_for(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return SGD with the gradients of all ranks; Adasum needs no larger learning rate with more ranks."""
    lr_scaler = 1 if options.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    distributed: torch.optim.Optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )
    return distributed


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """Train on a batch and return its loss."""
    images, labels = batch
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call] # torch's own
    optimizer.step()
    return loss.item()


def train(model: nn.Module, train_set: Dataset[tuple[Tensor, ...]], options: argparse.Namespace) -> None:
    """Train for some epochs, each rank on its own share."""
    optimizer = optimizer_for(model, options)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank()
    )
    for epoch in range(1, options.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        loss = 0.0
        for batch in DataLoader(train_set, batch_size=options.batch_size, sampler=sampler):
            loss = step(model, optimizer, batch)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")


def train_elastic(model: nn.Module, train_set: Dataset[tuple[Tensor, ...]], options: argparse.Namespace) -> None:
    """Train with commits, and return to the last one after a failure."""
    optimizer = optimizer_for(model, options)
    sampler = hvd.elastic.ElasticSampler(train_set)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)

    @hvd.elastic.run  # type: ignore[untyped-decorator] # whatever horovod is
    def loop(state: hvd.elastic.TorchState) -> None:
        while state.epoch <= options.epochs:
            model.train()
            for number, batch in enumerate(loader, start=state.batch):
                step(model, optimizer, batch)
                sampler.record_batch(number, options.batch_size)
                state.batch = number + 1
                if state.batch % 10 == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=1, batch=0))


def main() -> None:
    """Train and test; rank 0 prints the results."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits, with Horovod's interface.")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--elastic", action="store_true", help="commit, and resume from the last commit on failure")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    train_set, held_back = digits()
    model = Net()
    (train_elastic if options.elastic else train)(model, train_set, options)
    loss, accuracy = test(model, held_back)
    if hvd.rank() == 0:
        print(f"test loss {loss:.4f}, accuracy {100 * accuracy:.1f}%, {hvd.size()} ranks")


if __name__ == "__main__":
    main()

"""Learn handwritten digits on any number of ranks: `multiring run -n 2 -- python examples/digits_torch.py`.

It runs alone, under `multiring run`, mpiexec, torchrun and srun. It checks two conditions of data-parallel training: no
two ranks use the same image in one epoch, and all ranks have the same parameters at every step.
"""

import argparse
import hashlib
import os
import sys
import time

import numpy as np
import torch
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor, nn

import multiring
import multiring.torch as mt

HELD_BACK = 360  # test images, a fifth of 1797; independent of the training's seed


def digits(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the training set and the test set: images of shape (n, 1, 8, 8), and labels."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16.0).to(dtype).unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    order = torch.from_numpy(np.random.default_rng(2026).permutation(len(labels)))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


def network() -> nn.Module:
    """Return a small convolutional network; it has no batch norm and no dropout, so N ranks compute what one would."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def epoch_batches(images: int, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Return the images' indices in batches, shuffled anew; all ranks have equal generators and so equal batches."""
    return list(torch.split(torch.randperm(images, generator=generator), batch))


def check_shards(used: list[Tensor], images: int) -> None:
    """Exit unless all ranks together used each image once in this epoch; `used` are this rank's images."""
    everyones = np.asarray(multiring.world().all_gather(torch.cat(used)))
    if not np.array_equal(np.sort(everyones), np.arange(images)):
        raise SystemExit("the ranks' shards overlap, or miss images")


def check_parameters(model: nn.Module, step: int) -> None:
    """Exit unless all ranks have bit-identical parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().view(-1).view(torch.uint8).numpy().data)
    own = np.frombuffer(digest.digest(), np.uint64)
    hashes = np.asarray(multiring.world().all_gather(own))
    if (hashes != hashes[0]).any():
        shown = ", ".join(f"rank {rank} {value:016x}" for rank, value in enumerate(hashes))
        raise SystemExit(f"step {step}: the ranks' parameters differ: {shown}")


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the model's optimizer, which uses the gradients of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if not options.sharing:
        return optimizer
    compression = mt.PowerSGD(options.powersgd) if options.powersgd else getattr(mt.Compression, options.wire or "none")
    return mt.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        # Each rank's loss is its samples' part of the whole batch's mean. So the ranks' gradients add up to the
        # batch's gradient, even if shards have different lengths.
        op=mt.Sum,
        compression=compression,
        error_feedback=options.error_feedback,
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    options: argparse.Namespace,
    progress: Progress,
) -> int:
    """Train, and return the number of images that all ranks together used."""
    images, labels = data
    steps_per_epoch = -(-len(images) // options.batch)
    steps = options.steps or options.epochs * steps_per_epoch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    generator = torch.Generator().manual_seed(options.seed)
    bar = progress.add_task("", total=steps)
    done = seen = 0
    while done < steps:
        used = []
        for batch in epoch_batches(len(images), options.batch, generator)[: steps - done]:
            shard = batch[mt.rank() :: mt.size()]
            errors = nn.functional.cross_entropy(model(images[shard]), labels[shard], reduction="none")
            loss = errors.sum() / len(batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            scheduler.step()
            done += 1
            seen += len(batch)
            used.append(shard)
            check_parameters(model, done)
            progress.update(bar, advance=1, description=f"loss {errors.mean().item():.4f}")
        if len(used) == steps_per_epoch:
            check_shards(used, len(images))
        if progress.disable and mt.rank() == 0 and done // steps_per_epoch % 5 == 0:
            print(f"step {done} of {steps}: loss {errors.mean().item():.4f}", flush=True)
    return seen


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="end after this many steps instead of by epochs")
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--wire", choices=("fp16", "bf16", "int8"), help="the type of gradients between hosts")
    parser.add_argument("--error-feedback", action="store_true", help="add the wire's error to the next gradient")
    parser.add_argument("--powersgd", type=int, metavar="RANK", help="send gradients as factors of this rank")
    parser.add_argument(
        "--no-sharing", dest="sharing", action="store_false", help="let each rank train alone; the checks then fail"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Train, and print the accuracy, speed and waiting time."""
    options = options_of(sys.argv[1:])
    mt.init()
    # mpiexec lets every rank use all cores of the host.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // mt.local_size())))
    dtype = getattr(torch, options.dtype)
    data, (test_images, test_labels) = digits(dtype)
    torch.manual_seed(options.seed)
    model = network().to(dtype)
    mt.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = optimizer_of(model, options)

    is_shown = mt.rank() == 0 and sys.stdout.isatty()
    multiring.drain_events()
    start = time.perf_counter()
    with Progress(*Progress.get_default_columns(), disable=not is_shown) as progress:
        seen = train(model, optimizer, data, options, progress)
    elapsed_s = time.perf_counter() - start
    waited_s = sum(event.end_s - event.start_s for event in multiring.drain_events() if event.kind == "wait")

    waiting = mt.allreduce(torch.tensor(waited_s / elapsed_s, dtype=torch.float64)).item()
    if mt.rank() == 0:
        if options.sharing:
            print(f"{mt.gradient_bytes(optimizer)} bytes of gradients a step")
        print(
            f"test accuracy {accuracy(model, test_images, test_labels):.2%}, {seen / elapsed_s:.0f} images/s, "
            f"waiting {waiting:.1%} of {elapsed_s:.1f} s, {mt.size()} rank{'s' if mt.size() > 1 else ''}"
        )
    mt.shutdown()


if __name__ == "__main__":
    main()

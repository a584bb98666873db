"""Check which damaged samples `skip_bad` leaves out, and the weights of the rest."""

import os
import struct
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.data_files.values import add_file, chosen, framed, npy_of
from benchmarks.evidence.support.cases import Family, Fault, Random

from multiring.data import Dataset, Loader


def damaged_set(random: Random, folder: Path, count: int, bad: set[int]) -> tuple[Path, str | None]:
    """Write samples with one number each, some of them unreadable.

    Returns:
        The folder, and the format for `Dataset` or None.
    """
    where = folder / "d"
    where.mkdir()
    sort = chosen(random, ("npy-files", "tar", "tfrecord"))
    if sort == "npy-files":
        for number in range(count):
            np.save(where / f"{number:03}.npy", np.array([number], np.float32))
            if number in bad:
                os.truncate(where / f"{number:03}.npy", int(random.integers(0, 130)))
        return where, sort
    if sort == "tar":
        with tarfile.open(where / "a.tar", "w") as tar:
            for number in range(count):
                data = npy_of(np.array([number], np.float32))
                if number in bad:
                    data = data[: int(random.integers(len(data)))]
                add_file(tar, f"{number:03}.array.npy", data)
        return where, None
    with (where / "a.tfrecord").open("wb") as out:
        for number in range(count):
            value = struct.pack("<f", number)
            example = _field(1, _field(1, _field(1, b"array") + _field(2, _field(2, _field(1, value)))))
            record = bytearray(framed(example))
            if number in bad:
                record[int(random.integers(12, len(record)))] ^= 64
            out.write(record)
    return where, None


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def numbers_in(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of a batch's samples."""
    (rows,) = (value for name, value in batch.items() if name.startswith("array"))
    return [int(each) for each in np.asarray(rows).reshape(-1)]


def left_out(random: Random, folder: Path) -> Iterator[Fault]:
    """Read a damaged data set on several ranks, one after the other."""
    count = int(random.integers(1, 20))
    bad = set(random.integers(count, size=int(random.integers(1, 1 + count))).tolist())
    if len(bad) == count:
        bad.pop()
    where, kind = damaged_set(random, folder, count, bad)
    ranks, batch = int(random.integers(1, 5)), int(random.integers(1, count + 1))
    data = Dataset(where, format=kind, shuffle=chosen(random, ("none", "exact")), seed=3)
    counted: list[int] = []
    skipped = 0
    by_step: dict[int, list[float]] = {}
    for rank in range(ranks):
        loader = Loader(data, batch, rank=rank, ranks=ranks, skip_bad=True, workers=1)
        batches = iter(loader)
        while True:
            try:
                found = next(batches)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 -- no error may end the training
                yield Fault("left out: it ended the training", f"batch {batch}, {ranks} ranks, {bad}: {error!r}")
                return
            weight = loader.share.weight
            if weight:
                counted += numbers_in(found)
                each = weight / len(numbers_in(found))
                state = loader.state_dict()
                by_step.setdefault(state["epoch"] * 1000 + state["samples"], []).append(each)
        skipped += loader.skipped
        loader.close()
    if sorted(counted) != sorted(set(range(count)) - bad):
        yield Fault("left out: other samples than those that cannot be read", f"{sorted(counted)}, bad {sorted(bad)}")
    if skipped < len(bad):
        yield Fault("left out: fewer were counted", f"{skipped} of {sorted(bad)}")
    if any(max(each) - min(each) > 1e-9 for each in by_step.values()):
        yield Fault("left out: samples of different ranks count differently", f"{by_step}, bad {sorted(bad)}")


@cache
def _torch() -> Any:
    import multiring.torch as mt  # noqa: PLC0415 -- it joins the job

    mt.init()
    return mt


def gradients(random: Random, folder: Path) -> Iterator[Fault]:
    """Train a linear model on a damaged data set on two ranks.

    Each gradient must be the mean over the readable samples of the batch.
    """
    import torch  # noqa: PLC0415 -- as above

    mt = _torch()
    count = int(random.integers(2, 14))
    bad = set(random.integers(count, size=int(random.integers(1, 4))).tolist())
    if len(bad) == count:
        bad.pop()
    batch = int(random.integers(2, 8))
    if mt.rank() == 0:
        damaged_set(random, folder, count, bad)
    mt.barrier()
    # `Dataset` detects the format by the files' names, except for .npy files of one sample each.
    kind = "npy-files" if list((folder / "d").glob("*.npy")) else None
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = mt.DataLoader(Dataset(folder / "d", format=kind, shuffle="none"), batch, skip_bad=True)
    model, optimizer, loader = mt.distribute(model, plain, loader, learning_rate="keep")
    name = "array.npy" if (folder / "d" / "a.tar").exists() else "array"
    for found in loader:
        begin = (loader.state_dict()["samples"] or count) - 1
        begin -= begin % batch
        rest = [each for each in range(begin, min(begin + batch, count)) if each not in bad]
        before = model.weight.item()
        optimizer.zero_grad()
        model(found[name].reshape(-1, 1)).mean().backward()
        optimizer.step()
        gradient, wanted = before - model.weight.item(), sum(rest) / max(1, len(rest))
        if rest and abs(gradient - wanted) > 1e-4 * (1 + abs(before)):
            text = f"{gradient}, want {wanted}, the mean of {rest}; batch {batch}, bad {sorted(bad)}"
            yield Fault("left out: a gradient is not the mean over what is left", text)
            return


LEFT_OUT = (
    Family(name="left_out", run=left_out),
    Family(name="gradient", run=gradients, ranks=2),
)
SHOWS_LEFT_OUT = {
    "data_17_skip_bad.py": [
        "left out: it ended the training",
        "left out: samples of different ranks count differently",
    ],
    "reader_12.py": ["left out: a gradient is not the mean over what is left"],
}

"""Generate climate fields in CAM5's file layout, with storms and atmospheric rivers, and labels of every pixel.

    python -m examples.climate.generate fields --train 400 --val 60 --height 96 --width 144

It writes fields/train/data-*.h5, fields/val, fields/shifted (warmer, noisier, with more missing values) and
fields/stats.h5. A file has `climate/data` (height, width, 16), float32, and `climate/labels_0` (height, width), int:
0 background, 1 tropical cyclone, 2 atmospheric river. The statistics file has `climate/minval` and `climate/maxval`,
(16,).

Fields are sums of a climatology, vortices and filaments. Labels are computed before noise is added, by rules like
those for simulations. A cyclone is a connected region of strong wind around a deep and warm core. A river is a
connected region of strong moisture transport that is at least 2,000 km long and twice as long as wide. Cold lows, weak
lows and short plumes look similar and are background.

These are generated fields. Files of a simulation (Kurth et al. 2018) have the same layout, but none was tried.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from examples.generated import claim
from numpy.typing import NDArray
from scipy import ndimage

Field = NDArray[np.float64]
SPLITS = ("train", "val", "shifted")
# Moisture, wind at two heights, humidity, pressure, temperatures, rain, heights: the 16 channels of the published data.
CHANNELS = (
    *("TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL"),
    *("T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT"),
)
BACKGROUND, CYCLONE, RIVER = 0, 1, 2
KM_A_DEGREE = 111.2
RIVER_TRANSPORT = 250.0  # about kg / (m s), computed as moisture x wind of 850 hPa x RIVER_SCALE
RIVER_SCALE = 0.75
RIVER_KM, RIVER_RATIO = 2000.0, 2.0
STORM_WIND, STORM_DEPTH, STORM_WARMTH = 12.0, 6.0, 1.0  # m/s, hPa, K


@dataclass(frozen=True, kw_only=True, slots=True)
class Weather:
    """Parameters of a split's fields."""

    warmth: float = 0.0  # K, everywhere
    smooth: float = 1.0  # large-scale variability, relative to the channel's usual one
    white: float = 0.35  # noise of each pixel, relative to the channel's usual variability
    missing: float = 0.15  # the share of channels with a patch of NaN


WEATHER = {"train": Weather(), "val": Weather(), "shifted": Weather(warmth=2.0, smooth=1.3, white=0.6, missing=0.4)}


@dataclass(slots=True)
class Fields:
    """The noise-free fields by channel, and the storms' own contributions to wind, pressure and temperature."""

    lat: Field
    lon: Field
    by_name: dict[str, Field]
    wind: Field = field(init=False)  # m/s, of vortices only
    depth: Field = field(init=False)  # hPa
    warmth: Field = field(init=False)  # K, at 500 hPa

    def __post_init__(self) -> None:
        self.wind, self.depth, self.warmth = (np.zeros_like(self.lat) for _ in range(3))

    def distance(self, lat: float, lon: float) -> tuple[Field, Field, Field]:
        """Return each pixel's distance from a place, in degrees on the ground: north, east, and total."""
        north = self.lat - lat
        east = ((self.lon - lon + 180) % 360 - 180) * np.cos(np.radians(lat))
        return north, east, np.hypot(north, east)


def _climatology(height: int, width: int, warmth: float) -> Fields:
    lat = np.repeat(np.linspace(-90, 90, height)[:, None], width, 1)
    lon = np.repeat((np.arange(width) * 360.0 / width)[None], height, 0)
    polar = np.sin(np.radians(lat)) ** 2
    surface = 301 + warmth - 50 * polar
    jet = 14 * np.exp(-(((np.abs(lat) - 42) / 14) ** 2)) - 5 * np.exp(-((lat / 14) ** 2))
    moisture = (6 + 42 * np.exp(-((lat / 24) ** 2))) * (1 + 0.06 * warmth)
    pressure = 1012 + 6 * np.exp(-(((np.abs(lat) - 30) / 12) ** 2)) - 14 * np.exp(-(((np.abs(lat) - 62) / 12) ** 2))
    zero = np.zeros_like(lat)
    return Fields(
        lat,
        lon,
        {
            "TMQ": moisture,
            "U850": jet,
            "V850": zero.copy(),
            "UBOT": jet * 0.6,
            "VBOT": zero.copy(),
            "QREFHT": moisture * 3.4e-4,
            "PS": pressure - 4,
            "PSL": pressure,
            "T200": 220 - 6 * (1 - polar),
            "T500": surface - 34,
            "PRECT": moisture * 6e-10,
            "TS": surface,
            "TREFHT": surface - 1.5,
            "Z1000": pressure * 8 - 7990,
            "Z200": 12400 - 900 * polar,
            "ZBOT": 62 + 6 * (1 - polar),
        },
    )


def _vortex(fields: Fields, random: np.random.Generator, kind: str) -> None:
    """Add a low: a `cyclone`, warm and strong; or `weak` or `cold`, which do not count as cyclones."""
    south = -1 if random.random() < 0.5 else 1
    latitude = south * (random.uniform(8, 32) if kind != "cold" else random.uniform(14, 62))
    radius = random.uniform(3.0, 6.0) * (1.3 if kind == "cold" else 1.0)  # degrees, where the wind is strongest
    strongest = random.uniform(5, 11) if kind == "weak" else random.uniform(18, 45)
    warmth = {"cyclone": random.uniform(2.5, 6), "weak": random.uniform(0.5, 3), "cold": -random.uniform(0, 4)}[kind]
    north, east, distance = fields.distance(latitude, random.uniform(0, 360))
    relative = distance / radius
    speed = strongest * relative * np.exp(0.5 * (1 - relative**2))
    core, rain = np.exp(-((relative / 1.4) ** 2)), np.exp(-((relative / 1.8) ** 2))
    depth = 4 + strongest * 0.8
    away = np.maximum(distance, 1e-6)
    by_name = fields.by_name
    for level, share in (("850", 1.0), ("BOT", 0.75)):
        by_name["U" + level] -= south * share * speed * north / away
        by_name["V" + level] += south * share * speed * east / away
    for name, size in (("PSL", -depth), ("PS", -depth), ("Z1000", -8 * depth), ("T500", warmth), ("T200", warmth / 2)):
        by_name[name] += size * core
    for name, size in (("TMQ", 14.0), ("QREFHT", 2.5e-3), ("PRECT", 2.2e-7), ("Z200", 15 * warmth)):
        by_name[name] += size * rain
    fields.wind = np.hypot(fields.wind, speed)
    fields.depth += depth * core
    fields.warmth += warmth * core


def _filament(fields: Fields, random: np.random.Generator, *, long: bool) -> Field:
    """Add a moist stream from the tropics towards a pole; return its own transport of moisture."""
    south = -1 if random.random() < 0.5 else 1
    degrees = random.uniform(24, 50) if long else random.uniform(5, 11)
    wide, steps = random.uniform(2.2, 4.0), 48
    heading, curve = random.uniform(0.35, 1.1), random.uniform(-0.35, 0.35)  # radians from east, and along the path
    latitude, longitude = random.uniform(16, 26) if long else random.uniform(18, 45), random.uniform(0, 360)
    profile, u, v = (np.zeros_like(fields.lat) for _ in range(3))
    for step in range(steps):
        along = step / (steps - 1)
        angle = heading + curve * along
        _, _, distance = fields.distance(south * latitude, longitude)
        here = np.exp(-((distance / wide) ** 2)) * min(1.0, 6 * along + 0.3, 6 * (1 - along) + 0.3)
        better = here > profile
        profile = np.where(better, here, profile)
        u, v = np.where(better, np.cos(angle), u), np.where(better, np.sin(angle) * south, v)
        latitude += np.sin(angle) * degrees / steps
        longitude += np.cos(angle) * degrees / steps / np.cos(np.radians(latitude))
    moist, speed = random.uniform(18, 30), random.uniform(16, 28)
    by_name = fields.by_name
    by_name["TMQ"] += moist * profile
    by_name["QREFHT"] += 2e-3 * profile
    by_name["PRECT"] += 6e-8 * profile
    for level, share in (("850", 1.0), ("BOT", 0.6)):
        by_name["U" + level] += share * speed * profile * u
        by_name["V" + level] += share * speed * profile * v
    transport: Field = moist * speed * profile**2 * RIVER_SCALE
    return transport


def _labels(fields: Fields, transport: Field) -> NDArray[np.int64]:
    """Return the class of every pixel, by rules on connected regions of the noise-free fields."""
    labels = np.zeros(fields.lat.shape, np.int64)
    # Regions may cross the date line. So label three copies of the globe side by side, and take the middle one.
    width = fields.lat.shape[1]
    masks: list[tuple[int, Any]] = [(RIVER, transport > RIVER_TRANSPORT * 0.5), (CYCLONE, fields.wind > STORM_WIND)]
    for mark, mask in masks:
        regions, count = ndimage.label(np.tile(mask, (1, 3)), structure=np.ones((3, 3), int))
        for number in range(1, count + 1):
            rows, columns = np.nonzero(regions == number)
            middle = (columns >= width) & (columns < 2 * width)
            if not middle.any():
                continue
            holds = _is_river if mark == RIVER else _is_cyclone
            if holds(fields, rows, columns):
                labels[rows[middle], columns[middle] - width] = mark
        # The eye is calm, but belongs to the storm.
    storm = ndimage.binary_fill_holes(labels == CYCLONE)
    labels[storm] = CYCLONE
    return labels


def _is_river(fields: Fields, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> bool:
    height, width = fields.lat.shape
    north = fields.lat[rows, 0] * KM_A_DEGREE
    east = columns * (360.0 / width) * KM_A_DEGREE * np.cos(np.radians(fields.lat[rows, 0].mean()))
    if len(rows) < 4:
        return False
    # Standard deviations along the main axes; the length of a bar is sqrt(12) deviations.
    wide, long = np.sqrt(np.maximum(np.linalg.eigvalsh(np.cov(north, east)), (180 / height) ** 2))
    return bool(np.sqrt(12) * long >= RIVER_KM and long >= RIVER_RATIO * wide)


def _is_cyclone(fields: Fields, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> bool:
    columns = columns % fields.lat.shape[1]
    return bool(
        fields.depth[rows, columns].max() > STORM_DEPTH
        and fields.warmth[rows, columns].max() > STORM_WARMTH
        and np.abs(fields.lat[rows, 0]).mean() < 45
    )


def _smooth_noise(random: np.random.Generator, height: int, width: int) -> Field:
    """Return noise of mean 0 and deviation 1, weaker at finer scales; it is periodic around the globe."""
    up, across = np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width
    power = (4.0**2 + up**2 + across**2) ** -1.1
    noise = np.fft.irfft2(np.fft.rfft2(random.normal(size=(height, width))) * power, (height, width))
    scaled: Field = (noise - noise.mean()) / noise.std()
    return scaled


SPREAD = dict(
    zip(CHANNELS, (4, 4, 4, 3, 3, 8e-4, 3, 3, 1.5, 1.5, 2e-8, 2, 2, 24, 60, 2), strict=True)
)  # a channel's usual variability


def draw(split: str, number: int, height: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return fields (height, width, 16), with NaN for missing values, and labels (height, width)."""
    random = np.random.default_rng([SPLITS.index(split), number])
    weather = WEATHER[split]
    fields = _climatology(height, width, weather.warmth)
    for kind, most in (("cyclone", 5), ("weak", 5), ("cold", 6)):
        for _ in range(random.integers(1, most + 1)):
            _vortex(fields, random, kind)
    transport = np.zeros_like(fields.lat)
    for long, most in ((True, 5), (False, 8)):
        for _ in range(random.integers(1, most + 1)):
            transport = np.maximum(transport, _filament(fields, random, long=long))
    labels = _labels(fields, transport)
    data = np.empty((height, width, len(CHANNELS)), np.float32)
    for index, name in enumerate(CHANNELS):
        spread = SPREAD[name]
        noise = weather.smooth * _smooth_noise(random, height, width)
        noise += weather.white * random.normal(size=(height, width))
        data[..., index] = fields.by_name[name] + spread * noise
        if random.random() < weather.missing:
            top, left = random.integers(height), random.integers(width)
            data[top : top + height // 6, left : left + width // 6, index] = np.nan
    return data, labels


def _write(folder: Path, height: int, width: int, item: tuple[str, int]) -> tuple[Field, Field]:
    import h5py  # noqa: PLC0415 -- fields can be drawn without it

    split, number = item
    data, labels = draw(split, number, height, width)
    with h5py.File(folder / split / f"data-{number:06d}.h5", "w") as file:
        file["climate/data"] = data
        file["climate/labels_0"] = labels.astype(np.int32)
    return np.nanmin(data, (0, 1)), np.nanmax(data, (0, 1))


def generate(folder: Path, counts: dict[str, int], height: int, width: int, *, processes: int = 2) -> None:
    """Write `counts` files of each split, and the channels' extremes over the training files.

    Raises:
        ArgumentError: the folder has files that were not generated.
    """
    import h5py  # noqa: PLC0415 -- fields can be drawn without it

    claim(folder, counts=counts, height=height, width=width)
    for split in counts:
        (folder / split).mkdir(parents=True, exist_ok=True)
    items = [(split, number) for split, count in counts.items() for number in range(count)]
    with ProcessPoolExecutor(processes) as pool:
        extremes = list(pool.map(partial(_write, folder, height, width), items, chunksize=4))
    train = [each for each, (split, _) in zip(extremes, items, strict=True) if split == "train"]
    with h5py.File(folder / "stats.h5", "w") as file:
        file["climate/minval"] = np.min([low for low, _ in train], 0).astype(np.float32)
        file["climate/maxval"] = np.max([high for _, high in train], 0).astype(np.float32)


def main() -> None:
    """Generate the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="Generate climate fields in CAM5's file layout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=400, help="files")
    parser.add_argument("--val", type=int, default=60, help="files; as many again in the shifted split")
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    counts = {"train": options.train, "val": options.val, "shifted": options.val}
    generate(options.folder, counts, options.height, options.width, processes=options.processes)
    print(f"{options.folder}: {sum(counts.values())} generated files of {options.height} x {options.width} pixels")


if __name__ == "__main__":
    main()

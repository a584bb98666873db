"""Published rates of one accelerator: how many samples a second it trains, with the source of each."""

from dataclasses import dataclass

from multiring.errors import ArgumentError

_PAGE = "tensorflow/docs, site/en/r1/guide/performance/benchmarks.md"
_TENSORFLOW = f"TensorFlow benchmarks, May 2017, synthetic data, DGX-1 ({_PAGE})"
_TENSORFLOW_EC2 = f"TensorFlow benchmarks, May 2017, synthetic data, one die of an EC2 host ({_PAGE})"
_HOROVOD = "Horovod's README before its change 44, October 2017"
# 28 steps in four epochs, without the first of each, took 0.854 s in the median.
_CLIMATE = (
    "climate-seg-benchmark, run_scripts/climseg-cgpu-513075.out: the median step of one of eight V100 of a host of "
    "NERSC's Cori (docs-dev.nersc.gov/cgpu/hardware), with a gradient lag of 1"
)


@dataclass(frozen=True, slots=True)
class DeviceRate:
    """The samples a second that one accelerator trains in float32, with a batch of this size.

    A rate from a run on several accelerators is for predictions only. It is no rate for a row of published runs, which
    needs that of one accelerator alone.
    """

    accelerator: str
    model: str
    batch: int
    samples_per_s: float
    source: str


RATES = (
    DeviceRate("P100", "resnet50", 64, 219, _TENSORFLOW),
    DeviceRate("P100", "resnet50", 32, 195, _TENSORFLOW),
    DeviceRate("P100", "resnet152", 64, 91.8, _TENSORFLOW),
    DeviceRate("P100", "resnet152", 32, 82.7, _TENSORFLOW),
    DeviceRate("P100", "vgg16", 64, 154, _TENSORFLOW),
    DeviceRate("P100", "vgg16", 32, 144, _TENSORFLOW),
    DeviceRate("P100-PCIE", "resnet101", 64, 119.4, _HOROVOD),
    DeviceRate("P100-PCIE", "vgg16", 64, 130.9, _HOROVOD),
    DeviceRate("K80", "resnet50", 64, 51.5, _TENSORFLOW_EC2),
    DeviceRate("K80", "resnet152", 32, 19.7, _TENSORFLOW_EC2),
    DeviceRate("K80", "vgg16", 32, 36.3, _TENSORFLOW_EC2),
    DeviceRate("V100", "deeplabv3plus", 1, 1 / 0.854, _CLIMATE),
)


def rate_of(accelerator: str, model: str, batch: int) -> DeviceRate:
    """Return the published rate for these three.

    Raises:
        ArgumentError: there is none.
    """
    for each in RATES:
        if (each.accelerator, each.model, each.batch) == (accelerator, model, batch):
            return each
    known = ", ".join(f"{each.model} with a batch of {each.batch}" for each in RATES if each.accelerator == accelerator)
    raise ArgumentError(
        f"no published rate of one {accelerator or 'accelerator'} for {model} with a batch of {batch} (known: "
        f"{known or 'none'}): measure it on one rank and pass its samples a second with --rate"
    )

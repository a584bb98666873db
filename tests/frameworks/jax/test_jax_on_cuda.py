"""Programs with collectives are lowered for CUDA, and each rank takes a GPU of its own. tests/wire runs the handler."""

import re
from typing import Any

import pytest
from tests.support.later import framework
from tests.support.ranks import Here, RanksFailed, run_ranks

from multiring._verify.parts import PARTS
from multiring._verify.results import NOT_RUN
from multiring._verify.running import run_part

jax = framework("jax")
mj = framework("multiring.jax")
jnp = framework("jax.numpy")


def exported(_: Here, platform: str) -> str:
    mj.init()

    def step(x: Any) -> Any:
        first = mj.allreduce(jnp.sin(x), "sum")
        return mj.allgather(first + x), mj.broadcast(x)

    from jax import export  # noqa: PLC0415 -- as the others, only in ranks

    checks = [export.DisabledSafetyCheck.custom_call("multiring")]
    found: str = export.export(jax.jit(step), platforms=[platform], disabled_checks=checks)(
        jnp.ones((2, 3))
    ).mlir_module()
    return found


def test_programs_for_cuda_are_those_for_the_host() -> None:
    ((host, device),) = [[run_ranks(exported, 1, platform)[0] for platform in ("cpu", "cuda")]]
    calls = re.findall(r"stablehlo.custom_call @multiring\(.*?\) \{(.*?)\}", device)
    assert len(calls) == 3
    assert calls == re.findall(r"stablehlo.custom_call @multiring\(.*?\) \{(.*?)\}", host)


def test_programs_for_other_devices_are_refused() -> None:
    with pytest.raises(RanksFailed, match=r"(?i)multiring.*(tpu|platform)"):
        run_ranks(exported, 1, "tpu")


def choices(here: Here, gpus: int) -> str:
    from multiring.jax import devices  # noqa: PLC0415 -- as the others, only in ranks

    vars(devices)["visible_gpus"] = lambda _: gpus
    mj.init()
    assert mj.local_rank() == here.rank
    found: str = vars(devices)["xla_bridge"].CUDA_VISIBLE_DEVICES.value
    return found


@pytest.mark.parametrize(
    ("gpus", "chosen"), [(0, ["all"] * 3), (1, ["all"] * 3), (2, ["0", "1", "0"]), (8, ["0", "1", "2"])]
)
def test_each_rank_sees_one_gpu(gpus: int, chosen: list[str]) -> None:
    assert run_ranks(choices, 3, gpus) == chosen


def test_the_part_of_verify_is_not_run_without_a_gpu() -> None:
    part = next(each for each in PARTS if each.name == "jax")
    result = run_part(part, {"devices": ["a GPU"]})
    assert result.status == NOT_RUN, result
    assert "it needs JAX with CUDA" in result.reason

"""multiring profile: scripts that train with Keras."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiring._simulator.script_profile import script_profile_of

SCRIPT = """
import keras
import numpy as np
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)], name="small")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.random.rand(160, 8).astype("f"), np.random.randint(0, 2, 160), batch_size=4, epochs=1, verbose=0)
"""


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_keras_is_profiled_on_torch_only(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "multiring", "profile", "--steps", "4", "--", "python", "train.py"]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    if backend != "torch":
        assert ended.returncode == 2
        assert f"the script trains by Keras on {backend}, which multiring cannot profile: want" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    found = script_profile_of((tmp_path / "profile.json").read_text())
    assert (found.form, found.model, found.samples, found.steps) == ("Keras", "small", 4, 4)
    sizes = [("dense_1", 128), ("dense_1", 8), ("dense", 512), ("dense", 64)]
    assert sorted((each.name.split("/")[1], each.bytes) for each in found.gradients) == sorted(sizes)
    assert {each.name.split("/")[1] for each in found.gradients[:2]} == {"dense_1"}

"""JAX started before anything is compiled: the GPU that is not there stays."""

import os
import subprocess
import sys

import hlo_samples
import pytest

CODE = """
import remat_kit
import jax
key = jax.random.key(0)
step = remat_kit.Step(lambda x: x * 2, (jax.ShapeDtypeStruct((8,), "float32"),))
remat_kit.compile_step(remat_kit.trace(step, remat_kit.get_target("h100-sxm-80gb")))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_a_model_may_start_jax_before_it_is_compiled():
    hlo_samples.skip_without_plugin()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

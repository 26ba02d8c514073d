"""Sharded steps on eight devices of the CPU: a program of its own, since JAX asks once how many devices there are.

    python tests/sharded.py '{"build": "gpt", "mesh": "tensor=8", "options": {}, "policies": ["full"], "run": ["full"]}'

Writes one JSON object: for each policy how far loss and gradients are from those of one device without a policy, and,
for those in "run", the same of the state that a whole step returns, and what the compiled program says.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = 8
TINY = {
    "size": "tiny", "layers": 2, "width": 64, "heads": 8, "mlp_width": 64, "vocabulary": 64, "seq": 16, "batch": 8,
    "compute_dtype": "float32", "optimizer": "sgd",
}  # fmt: skip
"""A model that eight devices divide in every way. Plain gradient descent: its new state tells the gradients apart."""


def run(**asked: Any) -> dict[str, Any]:
    """What this program says of a case, from a process of its own."""
    root = Path(__file__).resolve().parents[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _case(asked: dict[str, Any]) -> dict[str, Any]:
    import jax
    import numpy as np

    from models import transformer
    from remat_kit import Workload, analyze, compile_step, get_policy, get_target, real_args, trace
    from remat_kit._measure import check_gradients, loss_and_gradients, run_once
    from remat_kit._sharding import place

    jax.config.update("jax_disable_most_optimizations", True)
    build, options = getattr(transformer, asked["build"]), {**TINY, **asked["options"]}
    target = get_target("cpu", asked["mesh"])

    def traced(policy: str, where: Any) -> Any:
        return trace(build(policy, **options), where, get_policy(policy))

    def after_one_step(step: Any) -> tuple[Any, Any]:
        compiled = compile_step(step)
        args = place(real_args(step.step), step.args)
        _, following = run_once(compiled, args)
        return compiled, following[0]

    reference = traced("none", get_target("cpu"))
    expected = loss_and_gradients(reference)
    answer: dict[str, Any] = {}
    for policy in asked["policies"]:
        check = check_gradients(traced(policy, target), reference, expected=expected)
        answer[policy] = {"gradients": dataclasses.asdict(check)}
    wanted = jax.device_get(after_one_step(reference)[1]) if asked.get("run") else None
    for policy in asked.get("run", ()):
        compiled, state = after_one_step(traced(policy, target))
        record = analyze(compiled, Workload("models.transformer:gpt"), policy)
        errors = jax.tree.map(
            lambda got, right: float(np.abs(np.asarray(got) - right).max()), jax.device_get(state), wanted
        )
        kept = jax.tree.map(lambda got, like: got.sharding == like.sharding, state, compiled.traced.args[0])
        answer.setdefault(policy, {})["step"] = {
            "worst_error": max(jax.tree.leaves(errors)),
            "shardings_kept": all(jax.tree.leaves(kept)),
            "record": record.to_json(),
        }
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_case(json.loads(sys.argv[1])), default=str))

"""Sharded steps that really run, on eight devices of the CPU: they compute what one device computes."""

import functools
from typing import Any

import pytest
import sharded

from remat_kit import POLICIES

EVERY, SOME = tuple(POLICIES), ("none", "full", "save_gathered_weights", "minimal_offloaded")
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sequence": ({"build": "gpt", "mesh": "tensor=8", "options": {"sequence_parallel": True}}, EVERY),
    "fsdp": ({"build": "llama", "mesh": "fsdp=8", "options": {"kv_heads": 8}}, EVERY),
    "tensor": ({"build": "gpt", "mesh": "tensor=8", "options": {}}, SOME),
    "all": (
        {"build": "gpt", "mesh": "data=2,fsdp=2,tensor=2", "options": {"stack": "unroll", "attention": "fused"}},
        SOME,
    ),
}
RUN = ("full", "none")
"""Policies whose whole step runs as well; the others differ from them in the gradients alone."""


@functools.cache
def answers(case: str) -> dict[str, Any]:
    asked, policies = CASES[case]
    return sharded.run(**asked, policies=policies, run=RUN)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "policy"), [(case, policy) for case in CASES for policy in CASES[case][1]])
def test_loss_and_gradients_are_those_of_one_device(case: str, policy: str) -> None:
    check = answers(case)[policy]["gradients"]
    # In float32: sums over devices are added in another order, which rounds otherwise.
    assert check["tolerance"] < 3e-5
    assert check["worst_error"] < check["tolerance"]
    assert abs(check["loss_error"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("policy", RUN)
@pytest.mark.parametrize("case", CASES)
def test_a_whole_step_returns_the_state_of_one_device_where_it_was(case: str, policy: str) -> None:
    step = answers(case)[policy]["step"]
    # One step of plain gradient descent at rate 0.01 moves parameters by up to 1e-2 times a gradient of order 1e-2.
    assert step["worst_error"] < 1e-7
    # So the step can be called with what it returned, and XLA could hand on the memory: all of the state.
    assert step["shardings_kept"]
    record = step["record"]
    assert record["alias_bytes"] == record["categories"]["parameters"]

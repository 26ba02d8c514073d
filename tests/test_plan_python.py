"""`to_python` and `to_maxtext`: the same program without this project, and the lines of MaxText's custom policy."""

import ast
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import planned
import pytest
from planned import LOSSES, X, plan_of, planner_of, random_solutions

from remat_kit import names
from remat_kit._plan.plan import Kept
from remat_kit._plan.python import to_maxtext, to_python

W = planned.weights()


@functools.cache
def plan(name):
    found = planner_of(LOSSES[name], W, X)
    return plan_of(found, random_solutions(found, 3))


def planned_by(text):
    namespace = {"__name__": "planned_by"}
    exec(compile(text, "planned_by.py", "exec"), namespace)
    return namespace["planned"]


@pytest.mark.parametrize("name", LOSSES)
def test_it_gives_the_same_program(name, assert_same_program):
    text = to_python(plan(name))
    assert "remat_kit" not in text
    ours = jax.make_jaxpr(jax.value_and_grad(plan(name).apply(LOSSES[name])))(W, X)
    theirs = jax.make_jaxpr(jax.value_and_grad(planned_by(text)(LOSSES[name])))(W, X)
    assert_same_program(theirs, ours)


def test_with_remat3(remat3, assert_same_program):
    ours = jax.make_jaxpr(jax.value_and_grad(plan("scan").apply(LOSSES["scan"])))(W, X)
    theirs = jax.make_jaxpr(jax.value_and_grad(planned_by(to_python(plan("scan")))(LOSSES["scan"])))(W, X)
    assert_same_program(theirs, ours)


_RUN = """
import importlib.util, sys
import jax, jax.numpy as jnp
import plan_of_mine

assert importlib.util.find_spec("remat_kit") is None

def loss(w, x):
    def turn(x, w):
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        hidden = jnp.tanh((x * scale) @ w["up"])
        return x + jax.nn.softmax(hidden @ w["mix"]) @ w["down"], None
    return jnp.sum(jax.lax.scan(turn, x @ w["in"], w["layers"])[0] ** 2)

layers = {"up": jnp.ones((4, 4, 6)), "mix": jnp.ones((4, 6, 6)), "down": jnp.ones((4, 6, 4))}
args = {"in": jnp.ones((4, 4)), "layers": layers}, jnp.ones((3, 4))
got, expected = (jax.grad(each)(*args) for each in (plan_of_mine.planned(loss), loss))
assert all(jnp.allclose(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)))
text = str(jax.make_jaxpr(jax.grad(plan_of_mine.planned(loss)))(*args))
print("checkpoint" in text or "remat" in text)
"""


def test_it_runs_where_this_project_is_not_installed(tmp_path):
    (tmp_path / "plan_of_mine.py").write_text(to_python(plan("scan")))
    # Only what is below the folders of JAX: an editable install of this checkout is a path file, which -S leaves out.
    packages = str(Path(jax.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), packages]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", _RUN], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_another_model_is_refused():
    apply = planned_by(to_python(plan("scan")))
    with pytest.raises(ValueError, match=r"the block at Site\(.*is not the one that this plan was made for"):
        jax.make_jaxpr(apply(LOSSES["scan"]))(planned.weights(hidden=8), X)
    with pytest.raises(ValueError, match=r"is not the one that this plan was made for"):
        jax.make_jaxpr(apply(LOSSES["scan"]))(planned.weights(layers=5), X)
    with pytest.raises(ValueError, match=r"should be a scan and is not"):
        jax.make_jaxpr(apply(LOSSES["unrolled"]))(W, X)


def test_it_says_what_it_is():
    named = dataclasses.replace(plan("scan"), workload="models.transformer:gpt")
    text = to_python(named)
    doc = ast.get_docstring(ast.parse(text))
    assert doc is not None
    assert doc.startswith(
        f"A rematerialization plan of models.transformer:gpt, made with remat-kit for cpu and JAX {jax.__version__}."
    )
    assert "block, 4 of them:" in doc
    for kept in named.blocks[0].kept:
        assert f"  save {kept.name} {kept.shape} of {kept.module or 'the block'}" in doc
    assert to_python(named) == text


def test_compiler_options_and_blocks_without_a_checkpoint_are_said():
    made = plan("scan")
    bare = tuple(dataclasses.replace(each, checkpointed=False, kept=()) for each in made.blocks)
    text = to_python(dataclasses.replace(made, blocks=bare, compiler_options={"xla_some": "7"}))
    assert "COMPILER_OPTIONS = {'xla_some': '7'}" in text
    assert "Give jax.jit(step, compiler_options=COMPILER_OPTIONS)" in text
    assert "are not checkpointed" in text
    assert "compute all again" not in text


def keeping(*kept):
    (block,) = plan("scan").blocks
    return dataclasses.replace(
        plan("scan"),
        blocks=tuple(
            dataclasses.replace(
                block,
                kept=tuple(Kept(number, 0, how, name, "", "", 1, 0.0) for number, (name, how) in enumerate(each)),
            )
            for each in kept
        ),
    )


class TestMaxText:
    """MaxText has one custom policy for all layers, and names of its own."""

    def test_names_that_it_has(self):
        text = to_maxtext(keeping([(names.OUT, "offload"), (names.CONTEXT, "save")]))
        assert text == "remat_policy: custom\ncontext: device\nout_proj: offload"

    def test_no_checkpoint(self):
        made = keeping([])
        bare = tuple(dataclasses.replace(each, checkpointed=False) for each in made.blocks)
        assert to_maxtext(dataclasses.replace(made, blocks=bare)) is None

    def test_nothing_kept(self):
        assert to_maxtext(keeping([])) == "remat_policy: custom"

    @pytest.mark.parametrize(
        "kept",
        [
            [[("dot_general", "save")]],
            [[(names.OUT, "save"), ("exp", "save")]],
            [[(names.OUT, "save")], [(names.OUT, "offload")]],
            [[(names.OUT, "save")], []],
            [],
        ],
        ids=["no name", "one without", "two ways", "layers that differ", "no block"],
    )
    def test_what_it_cannot_say(self, kept):
        assert to_maxtext(keeping(*kept)) is None

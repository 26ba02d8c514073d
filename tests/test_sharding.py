"""Where a step's arguments lie on a mesh: specs spread over pytrees, and one clear error for each that does not fit."""

import dataclasses
import re
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from models import transformer
from models.config import ConfigError, configure
from models.sharding import PARAMETERS, check_mesh, parameter_spec
from remat_kit import Step, TargetError, WorkloadError, get_policy, get_target, trace
from remat_kit._sharding import abstract_arguments, result_shardings, sharding_warnings
from remat_kit._step import replacements

P = PartitionSpec


def mesh(**axes: int) -> Any:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def step(shardings: Any, *, donate: tuple[int, ...] = (0,)) -> Step:
    """Parameters [16, 8] and [8], a batch [4, 16]; the new parameters and the loss come out."""

    def fn(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda leaf: leaf * 2, params), (batch @ params["w"] + params["b"]).sum()

    shape = jax.ShapeDtypeStruct
    params = {"w": shape((16, 8), jnp.float32), "b": shape((8,), jnp.float32)}
    return Step(fn, (params, shape((4, 16), jnp.float32)), donate, {"params": 0, "batch": 1}, shardings=shardings)


def specs(args: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, args)


GIVEN = ({"w": P("fsdp", "tensor"), "b": None}, P("fsdp"))


@pytest.mark.parametrize("given", [GIVEN, lambda mesh: GIVEN])
def test_specs_are_spread_over_the_arguments(given: Any) -> None:
    params, batch = specs(abstract_arguments(step(given), mesh(fsdp=2, tensor=4)))
    assert (params["w"], params["b"], batch) == (P("fsdp", "tensor"), P(), P("fsdp"))


def test_one_spec_stands_for_all_leaves_below_it() -> None:
    params, _ = specs(abstract_arguments(step((P("fsdp"), None)), mesh(fsdp=2, tensor=4)))
    assert params == {"w": P("fsdp"), "b": P("fsdp")}


def test_a_leaf_that_says_itself_where_it_is_stays_there() -> None:
    devices = mesh(fsdp=2, tensor=4)
    given = step((P("fsdp"), None))
    own = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=NamedSharding(devices, P(None, "tensor")))
    _, batch = specs(abstract_arguments(Step(given.fn, (given.args[0], own), shardings=given.shardings), devices))
    assert batch == P(None, "tensor")


def test_one_device_asks_for_no_specs() -> None:
    def never(mesh: Any) -> Any:
        raise AssertionError("asked")

    params, batch = specs(abstract_arguments(step(never), mesh(device=1)))
    assert (params["w"], batch) == (P(), P())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((P("fsdp"),), r"gave a tuple of 1 for 2 arguments\. Give a tuple with one PartitionSpec"),
        (P("fsdp"), r"gave a (P|PartitionSpec) for 2 arguments"),
        (({"w": P("fsdp")}, None), r"of argument 0 is no prefix of the argument: .*Give one PartitionSpec for all"),
        (("fsdp", None), r"has a str for argument 0\['b'\]\. Give a jax\.sharding\.PartitionSpec, or None"),
        ((P(None, "tensor"), None), r"for argument 0\['b'\], which has 1 dimensions \[8\]\. Give at most one entry"),
        ((None, P("tensr")), r"the mesh has no axis 'tensr'\. Did you mean 'tensor'\? Its axes: fsdp, tensor, odd"),
        ((None, P("odd")), r"dimension 0 of argument 1 has size 4, which does not divide into the 3 parts of odd=3\."),
        ((None, P(("fsdp", "tensor"))), r"has size 4, which does not divide into the 8 parts of fsdp=2 \* tensor=4\."),
    ],
)
def test_specs_that_do_not_fit_are_refused(given: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        abstract_arguments(step(given), mesh(fsdp=2, tensor=4, odd=3))


def test_what_replaces_a_donated_argument_lies_where_it_lay() -> None:
    devices = mesh(fsdp=2, tensor=4)
    one = step(GIVEN)
    args = abstract_arguments(one, devices)
    results = jax.eval_shape(one.fn, *one.args)
    assert replacements(one, results) == {0: 0}
    params, loss = result_shardings(one, args, results)
    assert (params["w"].spec, params["b"].spec, loss) == (P("fsdp", "tensor"), P(), None)
    # Nothing is said of results that replace nothing.
    assert jax.tree.leaves(result_shardings(step(GIVEN, donate=()), args, results)) == []


def test_arrays_of_the_state_that_are_on_every_device_are_named() -> None:
    devices = mesh(fsdp=8)
    large = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in ("first", "second")}
    given = ({"first": P("fsdp"), "second": None}, P("fsdp"))
    batch = jax.ShapeDtypeStruct((8, 1), jnp.float32)
    one = Step(lambda params, batch: params, (large, batch), (0,), {"params": 0}, shardings=given)
    (warning,) = sharding_warnings(one, abstract_arguments(one, devices), devices)
    assert re.search(
        r"1 arrays of params \(4\.00 MiB\) are on every device in full .* e\.g\. \['second'\]; shard", warning
    )


def test_small_arrays_of_a_large_state_are_not_named() -> None:
    devices = mesh(fsdp=8)
    state = {"matrix": jax.ShapeDtypeStruct((8, 64, 1024, 1024), jnp.float32)}
    state["scale"] = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)  # 4 MiB beside 256 on a device
    given = ({"matrix": P("fsdp"), "scale": None},)
    one = Step(lambda state: state, (state,), (0,), shardings=given)
    assert sharding_warnings(one, abstract_arguments(one, devices), devices) == ()


def test_a_step_is_traced_once_and_what_it_gives_is_told_where_to_lie() -> None:
    hlo_samples.skip_without_plugin()
    calls = []

    def fn(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        calls.append(jax.sharding.get_abstract_mesh().shape)
        return jax.tree.map(lambda leaf: leaf * 2, params), batch.sum()

    one = step(GIVEN)
    target = get_target("h100-sxm-80gb", "fsdp=2,tensor=4")
    traced = trace(dataclasses.replace(one, fn=fn), target)
    assert [dict(shape) for shape in calls] == [{"fsdp": 2, "tensor": 4}]
    assert jax.sharding.get_abstract_mesh().empty
    assert traced.warnings == ()


def test_an_axis_that_shards_nothing_is_named() -> None:
    devices = mesh(fsdp=2, tensor=4)
    one = step((P("fsdp"), P("fsdp")))
    (warning,) = sharding_warnings(one, abstract_arguments(one, devices), devices)
    assert warning == "no argument is sharded along mesh axis 'tensor', so its 4 devices may all do the same"


def test_a_step_without_shardings_is_done_in_full_by_every_device() -> None:
    devices = mesh(fsdp=2)
    (warning,) = sharding_warnings(step(None), abstract_arguments(step(None), devices), devices)
    assert "every argument is replicated on all 2 devices" in warning


def test_a_mesh_of_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(
        TargetError, match=r"needs 512 devices, \d+ are attached\. Use a smaller mesh, set XLA_FLAGS=--xla_"
    ):
        trace(step(None), get_target("cpu", "data=512"))


# The reference models

GPT = {"style": "gpt", "size": "tiny", "heads": 8, "batch": 8}


@pytest.mark.parametrize(
    ("changes", "axes", "message"),
    [
        ({"batch": 6}, {"data": 4}, r"batch 6 does not divide into the 4 parts of mesh data=4\. .*e\.g\. batch=8"),
        ({"batch": 4}, {"data": 2, "fsdp": 4}, r"batch 4 does not divide into the 8 parts of mesh data=2,fsdp=4"),
        ({"width": 72}, {"fsdp": 16, "tensor": 1}, r"width 72 does not divide into the 16 parts of mesh fsdp=16"),
        ({"heads": 4}, {"tensor": 8}, r"heads 4 does not divide into the 8 parts of mesh tensor=8"),
        ({"kv_heads": 2}, {"tensor": 8}, r"kv_heads 2 does not divide into the 8 parts of mesh tensor=8"),
        ({"mlp_width": 100}, {"tensor": 8}, r"mlp_width 100 does not divide .* e\.g\. mlp_width=104"),
        ({"vocabulary": 50257}, {"tensor": 8}, r"vocabulary 50257 does not divide .* e\.g\. vocabulary=50264"),
        ({"seq": 20, "sequence_parallel": True}, {"tensor": 8}, r"seq 20 does not divide into the 8 parts"),
        ({"sequence_parallel": True}, {"fsdp": 8}, r"sequence_parallel=true cuts .*'tensor', and the mesh has none"),
        ({}, {"model": 8}, r"mesh axis 'model' has no rule in this model\. Its axes are data, fsdp, tensor"),
    ],
)
def test_a_mesh_that_does_not_suit_the_model_is_refused(changes: Any, axes: Any, message: str) -> None:
    # A batch of 16 where it is not what is asked about.
    with pytest.raises(ConfigError, match=message):
        check_mesh(configure(**{**GPT, "batch": 16, **changes}), axes)


def test_a_sequence_that_is_not_cut_need_not_divide() -> None:
    check_mesh(configure(**GPT, seq=20), {"tensor": 8})


def test_sequence_parallel_is_yes_or_no() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel is 'yes'\. Give true or false"):
        configure(**GPT, sequence_parallel="yes")
    with pytest.raises(ConfigError, match=r"flat_masks is 1\. Give true or false"):
        configure(**GPT, flat_masks=1)


def test_the_refusal_reaches_who_traces() -> None:
    hlo_samples.skip_without_plugin()
    target = get_target("h100-sxm-80gb", "tensor=8")
    with pytest.raises(ConfigError, match="heads 4 does not divide into the 8 parts of mesh tensor=8"):
        trace(transformer.gpt("full", size="tiny", heads=4, platform="cuda"), target, get_policy("full"))


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("embed", "mlp"), (64, 128), P("fsdp", "tensor")),
        (("mlp", "embed"), (128, 64), P("tensor", "fsdp")),
        (("embed",), (64,), P("fsdp")),
        # No width to cut over fsdp: both along the only axis, where 8 parts can be made.
        (("mlp",), (128,), P(("tensor", "fsdp"))),
        (("mlp",), (12,), P("tensor")),
    ],
)
def test_parameters_are_cut_over_tensor_and_over_fsdp(axes: Any, shape: Any, expected: PartitionSpec) -> None:
    assert parameter_spec(axes, shape, {"fsdp": 2, "tensor": 4}) == expected


@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("build", [transformer.gpt, transformer.llama])
def test_every_parameter_has_its_axes_and_the_moments_lie_with_it(build: Any, stack: str) -> None:
    one = build("full", size="tiny", heads=8, batch=8, stack=stack)
    state, batch, key = abstract_arguments(one, mesh(data=2, fsdp=2, tensor=2))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        assert "fsdp" in str(leaf.sharding.spec), path
        matrix = any(name in str(path) for name in ("kernel", "embedding", "head"))
        assert ("tensor" in str(leaf.sharding.spec)) == (
            matrix or any(f"'{name}'), DictKey(key='bias'" in str(path) for name in ("query", "key", "value", "up"))
        ), path
        stacked = stack == "scan" and "'blocks'" in str(path)
        assert len(leaf.sharding.spec) == leaf.ndim
        assert (leaf.sharding.spec[0] is None) >= stacked
    moments = jax.tree.leaves(state.opt_state)
    count, rest = moments[0], moments[1:]
    assert count.sharding.spec == P()
    assert [each.sharding.spec for each in rest] == [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)] * 2
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(batch)} == {P(("data", "fsdp"))}
    assert key.sharding.spec == P()


def test_the_table_has_no_entry_that_no_model_uses() -> None:
    used = set()
    for one in (transformer.gpt("none", size="tiny"), transformer.llama("none", size="tiny")):
        for path, _ in jax.tree_util.tree_leaves_with_path(one.args[0].params):
            keys = tuple(str(each.key) for each in path)
            used.add(keys[-2:] if keys[-2:] in PARAMETERS else keys[-1:])
    assert used == set(PARAMETERS)

"""What is found to be a block, without a hint and with one."""

import jax
import jax.numpy as jnp
import planned
import pytest
from planned import X, layer, planner_of, scanned, segmented, unrolled

from remat_kit import Step, get_target
from remat_kit._errors import RematKitError
from remat_kit._plan.find import find_sites
from remat_kit._plan.layout import Site
from remat_kit._plan.search import Planner

W = planned.weights()
LISTED = planned.unstacked(W)
PRODUCTS = 3  # of a layer
OPS = len(jax.make_jaxpr(layer)(X, LISTED["layers"][0]).eqns)


def sites(loss, w=W, where=None):
    return find_sites(jax.make_jaxpr(loss)(w, X), where)


def instances(loss, w=W, where=None):
    """(how many programs the blocks have, repeats of each block, products of each block's program)."""
    found = planner_of(loss, w, X, where=where).found
    every = sorted((each for kind in found.kinds.values() for each in kind.instances), key=lambda each: each.site)
    products = [sum(op.primitive == "dot_general" for op in each.flat.ops) for each in every]
    return len({each.kind for each in every}), [each.repeats for each in every], products


def test_the_body_of_a_scan():
    assert sites(scanned()) == (Site((1,), None),)  # operation 0 is the first product
    assert instances(scanned()) == (1, [4], [PRODUCTS])


def test_a_checkpoint_in_the_body_of_a_scan():
    def loss(w, x):
        def turn(x, w):
            return jax.checkpoint(layer)(2.0 * x, w), None

        return jnp.sum(jax.lax.scan(turn, x, w["layers"])[0])

    assert sites(loss) == (Site((0,), (1, 2)),)
    assert instances(loss) == (1, [4], [PRODUCTS])


def test_the_inner_loop_of_segments():
    assert sites(segmented) == (Site((4, 0), None),)  # behind the first product and three reshapes
    assert instances(segmented) == (1, [4], [PRODUCTS])


def test_a_whole_loss_in_a_checkpoint():
    assert sites(jax.checkpoint(scanned())) == sites(scanned())
    assert sites(jax.checkpoint(unrolled(jax.checkpoint)))
    assert instances(jax.checkpoint(unrolled(jax.checkpoint))) == (1, [1] * 4, [PRODUCTS] * 4)


@pytest.mark.parametrize("w", [W, LISTED], ids=["slices of stacked weights", "a list"])
@pytest.mark.parametrize("loss", [unrolled(), unrolled(scope="layer")], ids=["repeated", "in scopes"])
def test_unrolled_layers(loss, w):
    found = sites(loss, w)
    assert len(found) == 4
    lengths = {site.stretch[1] - site.stretch[0] for site in found}
    assert len(lengths) == 1
    assert instances(loss, w) == (1, [1] * 4, [PRODUCTS] * 4)


def test_slices_of_stacked_weights_inside_of_the_scopes():
    def loss(w, x):
        for number in range(4):
            with jax.named_scope(f"layer_{number}"):
                x = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], w["layers"]))
        return jnp.sum(x)

    assert instances(loss) == (1, [1] * 4, [PRODUCTS] * 4)


def test_unrolled_checkpoints():
    found = sites(unrolled(jax.checkpoint), LISTED)
    assert found == tuple(Site((), (at, at + 1)) for at in range(1, 5))
    assert instances(unrolled(jax.checkpoint), LISTED) == (1, [1] * 4, [PRODUCTS] * 4)


def test_repeated_operations_are_cut_where_the_least_goes_from_one_to_the_next():
    first = sites(unrolled(), LISTED)[0]
    assert first.stretch is not None
    assert first.stretch[1] - first.stretch[0] == len(flat_ops(layer, X, LISTED["layers"][0]))
    # Only x [3, 4] goes from one layer to the next; anywhere else it would be x and a value of the layer.
    instance = planner_of(unrolled(), LISTED, X).found.kinds
    ((_, kind),) = instance.items()
    assert [len(each.outputs) for each in kind.instances] == [1, 1, 1, 1]


def flat_ops(function, *args):
    from remat_kit._plan.flat import Flat

    return Flat(jax.make_jaxpr(function)(*args)).ops


def test_a_number_of_the_layer_makes_no_other_kind():
    def loss(w, x, key):
        for number, own in enumerate(w["layers"]):
            with jax.named_scope(f"layer_{number}"):
                mask = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
                x = layer(x, own) * mask
        return jnp.sum(x)

    key = jax.random.key(0)
    found = Planner.of(Step(jax.value_and_grad(loss), (LISTED, X, key)), get_target("cpu")).found
    found_blocks = [each for kind in found.kinds.values() for each in kind.instances]
    assert len(found_blocks) == 4
    assert len({each.kind for each in found_blocks}) == 1
    # The number is an input of the block, which needs no memory of its own.
    assert all(len(each.inputs) - 1 in each.lasting for each in found_blocks)


def test_layers_that_differ_are_kinds_of_their_own():
    def loss(w, x):
        for number, own in enumerate(w["layers"]):
            with jax.named_scope(f"layer_{number}"):
                x = layer(x, own)
                x = jnp.sin(x) if number % 2 else x
        return jnp.sum(x)

    assert instances(loss, LISTED) == (2, [1] * 4, [PRODUCTS] * 4)


def test_the_innermost_numbered_module_that_is_more_than_a_layer():
    def loss(w, x):
        for stage in range(2):
            with jax.named_scope(f"stage_{stage}"):
                for number in range(2):
                    with jax.named_scope(f"block_{number}"):
                        x = layer(x, w["layers"][2 * stage + number])
        return jnp.sum(x)

    assert instances(loss, LISTED) == (1, [1] * 4, [PRODUCTS] * 4)


def test_blocks_inside_of_jitted_functions():
    def loss(w, x):
        run = jax.jit(layer)
        for own in w["layers"]:
            x = run(x, own)
        return jnp.sum(x)

    assert instances(loss, LISTED) == (1, [1] * 4, [PRODUCTS] * 4)
    assert instances(jax.jit(scanned())) == (1, [4], [PRODUCTS])


def test_a_loop_over_microbatches_outside_of_the_derivative():
    def step(w, xs):
        def turn(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(scanned())(w, x)), None

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, w), xs)[0]

    found = Planner.of(Step(step, (W, jnp.stack([X, X]))), get_target("cpu")).found
    assert found.sites == (Site((1,), None),)
    assert [kind.graph.repeats for kind in found.kinds.values()] == [4]  # layers; microbatches run one by one


def test_a_loop_over_microbatches_inside_of_the_derivative():
    def loss(w, xs):
        return jnp.sum(jax.lax.scan(lambda total, x: (total + scanned()(w, x), None), 0.0, xs)[0])

    found = find_sites(jax.make_jaxpr(loss)(W, jnp.stack([X, X])))
    assert found == (Site((0, 1), None),)


class TestWhere:
    """A pattern on module paths in the place of finding."""

    def test_it_says_what_a_block_is(self):
        found = sites(unrolled(scope="layer"), LISTED, r"layer_[12]")
        assert len(found) == 2
        assert found == sites(unrolled(scope="layer"), LISTED)[1:3]

    def test_in_the_body_of_a_scan(self):
        def loss(w, x):
            def turn(x, w):
                with jax.named_scope("mine"):
                    y = layer(x, w)
                return jnp.tanh(y @ w["up"]) @ w["down"], None

            return jnp.sum(jax.lax.scan(turn, x, w["layers"])[0])

        (site,) = sites(loss, where="mine")
        assert site.scans == (0,)
        assert site.stretch is not None

    def test_it_fits_nothing(self):
        with pytest.raises(RematKitError, match=r"no operation is in a module that --where 'block' fits.*layer_0"):
            sites(unrolled(scope="layer"), LISTED, "block")
        with pytest.raises(RematKitError, match="Its operations have no scopes"):
            sites(unrolled(), LISTED, "block")

    def test_it_is_no_regular_expression(self):
        with pytest.raises(RematKitError, match=r"--where 'layer_\(' is not a regular expression:.*Try e\.g\."):
            sites(unrolled(scope="layer"), LISTED, "layer_(")


def test_nothing_is_found():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w["in"]))

    with pytest.raises(
        RematKitError,
        match=r"found no block to plan: no scan over layers.*begin with: head\..*--where REGEX, or wrap a layer in jax",
    ):
        sites(loss)


def test_loops_that_are_no_layers_are_left():
    def loss(w, x):
        x = jax.lax.scan(lambda x, y: (x + jnp.tanh(y), None), x, jnp.stack([x, x]))[0]  # no product
        return scanned()(w, x)

    assert sites(loss) == (Site((3,), None),)

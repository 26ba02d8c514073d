"""Which modules `where` means, and which repeat, told from classes, paths and shapes alone."""

import pytest
from flax import linen as nn
from flax import nnx

from remat_kit._enable.where import Part, outermost, path_regex, picker, repeated


class Mlp(nnx.Module):
    pass


class Stack(nnx.Module):
    pass


@pytest.mark.parametrize(
    "glob", ["layers.*", "layers/*", "layers_*", "layers[*]", "layers.0", "layers_0", "layers[0]", "**/0", "l*s[?]"]
)
def test_globs_of_paths(glob):
    pick = picker((glob,))
    assert pick(Mlp, ("layers", "0"))
    assert pick(Mlp, ("layers_0",)) == (glob != "**/0" or pick(Mlp, ("layers", "0")))
    assert not pick(Mlp, ("layers",))
    assert not pick(Mlp, ("layers", "0", "up"))
    assert not pick(Mlp, ("other", "0", "x"))


def test_classes_and_their_names():
    class Wide(Mlp):
        pass

    assert picker((Mlp,))(Wide, ("a",))
    assert not picker(("Mlp",))(Wide, ("a",))
    assert picker(("M*",))(Mlp, ("a",))
    assert picker(("Mlp",))(Mlp, ())
    assert not picker(("*",))(Mlp, ())  # a glob never means the model as a whole
    assert path_regex("a.b[*]") == "a/b/[^/]*"


def part(path, cls=Mlp, shapes=((8, 16), (16, 8))):
    return Part(tuple(path.split("/")), cls, shapes)


def test_only_the_outermost_of_nested_modules_count():
    assert [each.text for each in outermost([part("a/b"), part("a"), part("c/d/e"), part("ab")])] == [
        "a",
        "ab",
        "c/d/e",
    ]


def paths(parts):
    return sorted(each.text for each in repeated(parts))


def test_what_repeats_with_most_parameters_is_found():
    inner = [part(f"stages/{stage}/blocks/{block}") for stage in (0, 1) for block in (0, 1)]
    stages = [part(f"stages/{stage}", Stack, inner[0].shapes * 2) for stage in (0, 1)]
    assert paths([*stages, *inner]) == [each.text for each in inner]  # all of a stage is in its blocks
    pairs = [part(f"layers/{layer}/attn_{n}", Stack) for layer in (0, 1) for n in (0, 1)]
    layers = [part(f"layers/{layer}", Mlp, pairs[0].shapes * 4) for layer in (0, 1)]
    assert paths([*layers, *pairs]) == ["layers/0", "layers/1"]  # attention is half of a layer
    decoder = [part(f"decoder/{layer}", Stack) for layer in (0, 1)]
    assert paths([*layers, *decoder]) == ["decoder/0", "decoder/1", "layers/0", "layers/1"]
    small = [part(f"small/{layer}", Stack, ((2, 2), (2, 2))) for layer in (0, 1)]
    assert paths([*layers, *small]) == ["layers/0", "layers/1"]
    embeddings = [part(f"embed_{n}", nnx.Embed, ((1000, 8),)) for n in (0, 1)]
    assert paths(embeddings) == []  # one layer each
    mixers = [part(f"layers/{layer}/mixer", Stack) for layer in (0, 1)]
    normed = [part(f"layers/{layer}", Mlp, (*mixers[0].shapes, (8,))) for layer in (0, 1)]
    assert paths([*normed, *mixers]) == ["layers/0", "layers/1"]  # all but a norm is in one module of each
    experts = [part(f"layers/{layer}/experts/{n}", Stack) for layer in (0, 1) for n in range(8)]
    moe = [part(f"layers/{layer}", Mlp, experts[0].shapes * 8 + ((8, 8),) * 2) for layer in (0, 1)]
    assert paths([*moe, *experts]) == ["layers/0", "layers/1"]  # beside attention


def test_a_stacked_module_is_found():
    stacked = ((3, 8, 16), (3, 16), (3, 16, 8), (3, 8))
    assert paths([part("layers", Mlp, stacked), part("head", nnx.Linear, ((8, 2), (2,)))]) == ["layers"]
    inner = [part(f"layers/Dense_{n}", nn.Dense, stacked[2 * n : 2 * n + 2]) for n in (0, 1)]
    assert paths([*inner, part("layers", Mlp, stacked)]) == ["layers"]
    assert paths([part("one", Mlp, ((8, 8), (8,), (8, 8), (8,)))]) == []

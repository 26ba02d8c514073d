"""√N checkpointing on a small range of depths: how saved bytes grow, and how much runs again (Chen et al. 2016)."""

import json

import pytest

from experiments import chen_sqrt

DEPTHS = (4, 16, 64, 256)


@pytest.fixture(scope="module")
def result():
    return chen_sqrt.run(DEPTHS, ("none", "full", "segments(sqrt)", "segments(sqrt,full)", "segments(recursive)"))


def test_saved_bytes_grow_with_the_square_root_of_the_depth(result):
    fits = {policy: fit["saved"] for policy, fit in result["exponents"].items()}
    assert fits["none"] == pytest.approx(1, abs=0.01)
    assert fits["full"] == pytest.approx(1, abs=0.01)
    assert fits["segments(sqrt)"] == pytest.approx(0.5, abs=0.01)  # 2, 4, 8 and 16 segments
    assert fits["segments(recursive)"] == pytest.approx(0, abs=0.01)  # the two halves of the outermost level
    assert chen_sqrt.is_sqrt(result)


def test_what_is_alive_at_once_grows_with_it_too(result):
    assert result["exponents"]["segments(sqrt)"]["alive"] == pytest.approx(0.5, abs=0.01)
    assert result["exponents"]["none"]["alive"] == pytest.approx(1, abs=0.01)


def test_at_most_one_more_forward(result):
    again = {(each["policy"], each["layers"]): each["recomputed_forwards"] for each in result["rows"]}
    for layers in DEPTHS:
        assert again["none", layers] == 0
        # Of a block alone the last product is not run again, of a part that is a scan it is; the head never is.
        assert again["full", layers] < again["segments(sqrt)", layers] < 1
        assert 1.5 < again["segments(sqrt,full)", layers] < 2


def test_saved_bytes_are_those_of_the_borders(result):
    border = result["block_input_bytes"]
    assert border == 8 * 32 * 64 * 2  # batch, positions, width, bfloat16
    kept = {(each["policy"], each["layers"]): each["saved_bytes"] for each in result["rows"]}
    for layers, parts in zip(DEPTHS, (2, 4, 8, 16), strict=True):
        assert kept["segments(sqrt)", layers] == parts * border
        assert kept["full", layers] == layers * border
        assert kept["none", layers] == layers * result["block_bytes_without_checkpoint"]


def test_the_kept_result_is_one_of_this_code():
    kept = json.loads((chen_sqrt.RESULTS / "chen_sqrt.json").read_text())
    assert chen_sqrt.is_sqrt(kept)
    assert {each["layers"] for each in kept["rows"]} == set(chen_sqrt.DEPTHS)
    assert set(kept["exponents"]) == set(chen_sqrt.POLICIES)
    assert kept["claim"]["published"] == chen_sqrt.PUBLISHED
    lines = chen_sqrt.table(kept).splitlines()
    assert len(lines) == 2 + len(chen_sqrt.POLICIES)
    assert len({line.count("|") for line in lines}) == 1
    # A result in which √N is not √N is told.
    kept["exponents"]["segments(sqrt)"]["saved"] = 0.6
    assert not chen_sqrt.is_sqrt(kept)

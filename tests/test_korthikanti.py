"""The reproduction of Korthikanti et al.: its formulas are theirs, and the kept results are near the published ones."""

import json

import pytest

from experiments import korthikanti
from models.config import SIZES

ROWS = json.loads(korthikanti.RESULTS.read_text())


@pytest.mark.parametrize("size", korthikanti.SIZES)
def test_the_formulas_give_the_published_percentages(size):
    sbh, scores = korthikanti.dimensions(size)
    base = korthikanti.published_bytes("tensor", sbh, scores, masks=True)
    for variant, percent in korthikanti.PUBLISHED_PERCENT[size].items():
        ours = 100 * korthikanti.published_bytes(variant, sbh, scores, masks=True) / base
        assert ours == pytest.approx(percent, abs=0.06), variant


def test_every_program_was_compiled_once():
    assert sorted(map(korthikanti.cell_of, ROWS)) == sorted(korthikanti.cells(list(korthikanti.SIZES)))


@pytest.mark.parametrize("size", korthikanti.SIZES)
def test_what_a_layer_keeps_is_within_three_points_of_the_published_share(size):
    found = korthikanti.percentages(ROWS, size)
    for variant, percent in korthikanti.PUBLISHED_PERCENT[size].items():
        assert abs(found[variant] - percent) <= korthikanti.POINTS, variant


@pytest.mark.parametrize("size", korthikanti.SIZES)
@pytest.mark.parametrize("variant", [name for name in korthikanti.VARIANTS if not name.startswith("none")])
def test_a_layer_keeps_what_the_formula_without_masks_says(size, variant):
    sbh, scores = korthikanti.dimensions(size)
    kept = korthikanti.a_layer(ROWS, size, variant)["kept_bytes"]
    # Statistics of the norms and the like: less than a thousandth.
    assert kept == pytest.approx(korthikanti.published_bytes(variant, sbh, scores, masks=False), rel=1e-3)


@pytest.mark.parametrize("setting", korthikanti.SETTINGS)
def test_the_terms_of_an_overhead_are_all_of_it(setting):
    base = korthikanti.a_layer(ROWS, korthikanti.TIMED, "none", setting)
    for variant, found in korthikanti.overheads(ROWS, setting).items():
        own = korthikanti.a_layer(ROWS, korthikanti.TIMED, variant, setting)
        assert found.total - found.last == pytest.approx(100 * (own["seconds"] / base["seconds"] - 1))
        assert found.last == pytest.approx(100 * base[korthikanti.LAST[variant]] / base["seconds"])
        assert found.last > 0


@pytest.mark.parametrize("variant", korthikanti.PUBLISHED_OVERHEAD)
def test_the_time_of_each_technique_is_within_six_points_of_the_published_one(variant):
    found = korthikanti.overheads(ROWS)[variant]
    assert abs(found.total - korthikanti.PUBLISHED_OVERHEAD[variant]) <= korthikanti.TIME_POINTS


@pytest.mark.parametrize("setting", korthikanti.SETTINGS)
def test_the_last_product_is_not_run_again(setting):
    sbh, scores = korthikanti.dimensions(korthikanti.TIMED)
    width, heads = (SIZES["gpt"][korthikanti.TIMED][name] for name in ("width", "heads"))
    attention = 2 * sbh * scores * width / heads  # that of scores, or that of context
    mlp = 2 * sbh * 4 * width
    forward = 4 * 2 * sbh * width + 2 * attention + 2 * mlp
    again = {"full": forward - mlp, "tensor + selective": attention, "tensor + sequence + selective": attention}
    for variant, flops in again.items():
        assert korthikanti.a_layer(ROWS, korthikanti.TIMED, variant, setting)["recompute_flops"] == flops


def test_the_table_is_that_of_the_rows():
    assert korthikanti.TABLE.read_text() == korthikanti.table(ROWS)

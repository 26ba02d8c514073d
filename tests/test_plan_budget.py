"""`parse_budget`: what a user may write, and what is answered to the rest."""

import math

import pytest

from remat_kit import get_target
from remat_kit._errors import PlanError
from remat_kit._plan.budget import parse_budget

H100 = get_target("h100-sxm-80gb")
MEMORY = H100.chip.memory_bytes
GiB = 1024**3


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, None),
        ("40GiB", 40 * GiB),
        (" 40 gib ", 40 * GiB),
        ("1.5GiB", 3 * GiB // 2),
        ("512MiB", GiB // 2),
        ("40GB", 40 * 10**9),
        ("4096", 4096),
        (4096, 4096),
        ("50%", round(MEMORY / 2)),
        (" 12.5 % ", round(MEMORY / 8)),
        ("100%", MEMORY),
        (MEMORY, MEMORY),
        (1, 1),
    ],
)
def test_what_is_a_budget(budget, expected):
    assert parse_budget(budget, H100) == expected


@pytest.mark.parametrize("budget", [0, "0", "0GiB", "0%", -1, "-5%"])
def test_no_memory_at_all(budget):
    with pytest.raises(PlanError, match=r"the budget is .*, which is no memory\. Give e\.g\. 40GiB"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", ["-40GiB", " -1"])
def test_below_zero(budget):
    with pytest.raises(PlanError, match=r"the budget is ' ?-.*', below 0\. Give e\.g\. 40GiB, or 90% of the device"):
        parse_budget(budget, H100)


@pytest.mark.parametrize(
    "budget", ["40", "40GiBs", "40 parsecs", "GiB", "", "nan", "nanGiB", "inf", "nan%", "1e3GiB", "%"]
)
def test_no_unit_that_is_known(budget):
    if budget == "40":
        assert parse_budget(budget, H100) == 40  # bytes
        return
    with pytest.raises(PlanError, match=r"is not a size in bytes\..*Or give a share of the device, e\.g\. 90%"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", [math.nan, math.inf, 4e9, True, b"40GiB", [40], {}])
def test_no_type_that_is_known(budget):
    with pytest.raises(PlanError, match=r"the budget is .*\. Give bytes as a whole number, or text such as '40GiB'"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", ["81GiB", "101%", MEMORY + 1, "10000000000TiB", "9" * 400 + "%"])
def test_beyond_the_device(budget):
    with pytest.raises(PlanError, match=r"the budget is .*, and h100-sxm-80gb has .*one process can use.*at most that"):
        parse_budget(budget, H100)

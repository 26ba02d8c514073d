"""`parse_budget`: what a user may write, and what is answered to the rest."""

import math

import numpy as np
import pytest

from remat_kit import get_target
from remat_kit._errors import PlanError
from remat_kit._plan.budget import parse_budget
from remat_kit._target import capacity, judge_fit

H100 = get_target("h100-sxm-80gb")
MEMORY = H100.chip.memory_bytes
ROOM = capacity(H100).capacity_bytes
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
        ("40", 40),
        (4096, 4096),
        (np.int64(10**9), 10**9),
        (np.uint8(40), 40),
        ("50%", round(MEMORY / 2)),
        (" 12.5 % ", round(MEMORY / 8)),
        ("93%", round(MEMORY * 0.93)),
        (ROOM, ROOM),
        (1, 1),
    ],
)
def test_what_is_a_budget(budget, expected):
    found = parse_budget(budget, H100)
    assert found == expected
    assert type(found) is type(expected)
    assert found is None or judge_fit(found, H100).fits != "no"


@pytest.mark.parametrize("budget", [0, "0", "0GiB", "0%", -1, "-5%"])
def test_no_memory_at_all(budget):
    with pytest.raises(PlanError, match=r"the budget is .*, which is no memory\. Give e\.g\. 40GiB"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", ["-40GiB", " -1"])
def test_below_zero(budget):
    with pytest.raises(PlanError, match=r"the budget is ' ?-.*', below 0\. Give e\.g\. 40GiB, or 90% of the device"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", ["40GiBs", "40 parsecs", "GiB", "", "nan", "nanGiB", "inf", "nan%", "1e3GiB", "%"])
def test_no_unit_that_is_known(budget):
    with pytest.raises(PlanError, match=r"is not a size in bytes\..*Or give a share of the device, e\.g\. 90%"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", [math.nan, math.inf, 4e9, True, np.float32(4), np.bool_(1), b"40", [40], {}])
def test_no_type_that_is_known(budget):
    with pytest.raises(PlanError, match=r"the budget is .*\. Give bytes as a whole number, or text such as '40GiB'"):
        parse_budget(budget, H100)


@pytest.mark.parametrize("budget", ["75GiB", "94%", "100%", ROOM + 1, "10000000000TiB", "9" * 400 + "%"])
def test_beyond_what_a_process_can_allocate(budget):
    said = rf"the budget is .*, and h100-sxm-80gb has 79\.11 GiB, of which one process can use 74\.2. GiB.*{ROOM} bytes"
    with pytest.raises(PlanError, match=said):
        parse_budget(budget, H100)


def test_devices_of_a_mesh_of_cpus_share_the_memory():
    pair = get_target("cpu", "data=2")
    memory = pair.chip.memory_bytes
    assert parse_budget("50%", pair) == memory // 2
    with pytest.raises(PlanError, match="one process can use"):
        parse_budget("51%", pair)

"""Copies to the host and back: windows, what is waited for, and advice, against programs counted by hand."""

import math
import re

import pytest
from hlo_samples import BF16, CHIP, HOST, LAUNCH, MATMUL, add, close, hand_made, step

from remat_kit._hlo.module import Module
from remat_kit._hlo.roofline import predict
from remat_kit._overlap import Kept, Overlap, Trip, overlap

BYTES = 4096 * 8192 * 2
COPY_S = BYTES / HOST + LAUNCH
PRODUCT_S = 2 * 4096**3 / MATMUL + LAUNCH
FORWARD, BACKWARD = "jit(f)/jvp()/dot_general", "jit(f)/transpose(jvp())/dot_general"


def program(order: str) -> Module:
    """An array of 64 MiB that goes to the host and back beside products, in the order of the letters.

    F, B: a product of forward, of backward; o, O: the copy out starts, ends; i, I: the copy back.
    """

    def main(computation):
        add(computation, 1, "parameter", (4096, 8192), dtype=BF16)
        add(computation, 2, "parameter", (4096, 4096), dtype=BF16, parameter_number=1)
        ids, made = {}, []
        for identifier, letter in enumerate(order, start=3):
            ids[letter] = identifier
            if letter in "FB":
                dot = add(computation, identifier, "dot", (4096, 4096), [2, 2], dtype=BF16)
                dot.dot_dimension_numbers.lhs_contracting_dimensions.append(1)
                dot.dot_dimension_numbers.rhs_contracting_dimensions.append(0)
                dot.metadata.op_name = FORWARD if letter == "F" else BACKWARD
                made.append(identifier)
            elif letter in "oi":
                spaces, operand = ((5, 0), 1) if letter == "o" else ((0, 5), ids["O"])
                pair = [(BF16, (4096, 8192), space) for space in spaces]
                add(computation, identifier, "copy-start", operands=[operand], tuple_of=[*pair, (8, (), 0)])
            else:
                start, space = (ids["o"], 5) if letter == "O" else (ids["i"], 0)
                add(computation, identifier, "copy-done", (4096, 8192), [start], dtype=BF16, space=space)
                if letter == "I":
                    made.append(identifier)
        kinds = [(BF16, (4096, 4096), 0)] * (len(made) - 1) + [(BF16, (4096, 8192), 0)]
        return add(computation, len(order) + 3, "tuple", operands=made, tuple_of=kinds).id

    return Module.from_proto(hand_made(main=main))


def copies(order: str) -> Overlap:
    module = program(order)
    prediction = predict(module, CHIP)
    found = overlap(module, prediction)
    assert math.isclose(found.exposed_s, prediction.breakdown["host_copy"], abs_tol=1e-15)
    assert found.step_s == prediction.seconds
    return found


def test_a_window_is_what_runs_between_the_copies():
    # The copy out runs from the start, one product beside it; then a product; then the copy back beside another.
    found = copies("oFOFiBI")
    (trip,) = found.trips
    assert (trip.bytes, trip.count, trip.late, trip.loop) == (BYTES, 1, False, "")
    assert close(trip.link_s, 2 * COPY_S)
    assert close(trip.exposed_s, 2 * (COPY_S - PRODUCT_S))
    assert trip.window_s is not None
    assert close(trip.window_s, PRODUCT_S)
    assert trip.window_s == trip.longest_window_s
    assert close(found.step_s, 2 * COPY_S + PRODUCT_S)


def test_a_copy_back_waits_for_the_link():
    # Nothing waits for the copy out before the copy back, which begins where that ends.
    (trip,) = copies("oFOiBI").trips
    assert trip.window_s == pytest.approx(0.0, abs=1e-15)


def test_a_copy_out_in_backward_is_late():
    found = copies("FFBoOiBI")
    (trip,) = found.trips
    assert trip.late
    assert found.keep_last() == Kept(0, 0.0, 0)  # the value is on the device all the time
    said, waits = found.advice()
    assert said.startswith(
        "of the offloaded values, 64.00 MiB (1 value) leave for the host only when backward has begun"
    )
    assert re.search(r"Scan the layers.*or keep these values: saves 3\.18 ms", said)
    assert "keep the last" not in waits


def test_advice_to_keep_the_last_values_has_its_price():
    found = copies("oFOFiBI")
    (said,) = found.advice()
    assert said == (
        "the step waits 3.01 ms of 3.53 ms (predicted) for copies to and from the host, which take 3.36 ms of the "
        "link; keep the last 1 value on the device: saves 3.01 ms, costs 64.00 MiB"
    )
    assert found.advice(budget_bytes=BYTES) == (said,)
    assert "keep" not in found.advice(budget_bytes=BYTES - 1)[0]


def trip(name: str, exposed_s: float, count: int = 1, late: bool = False, loop: str = "") -> Trip:
    return Trip(name, name, 100, count, 2.0, exposed_s, 1.0, 1.0, late, loop)


def test_values_are_kept_from_the_last_one_made_until_copies_hide():
    found = Overlap((trip("a", 1.0), trip("b", 0.0), trip("c", 0.25), trip("d", 0.5)), step_s=100.0)
    assert found.link_s == 8.0
    assert found.exposed_s == 1.75
    assert found.keep_last() == Kept(2, 0.75, 200)  # b is hidden, so a, made before it, has time enough
    assert found.keep_last(199) == Kept(1, 0.5, 100)
    assert found.keep_last(0) == Kept(0, 0.0, 0)


def test_a_turn_of_a_loop_is_kept_as_a_whole():
    loop = (trip("q", 0.25, count=8, loop="while.1"), trip("k", 0.5, count=8, loop="while.1"))
    found = Overlap((trip("a", 1.0), *loop), step_s=10.0)
    assert found.keep_last() == Kept(17, 7.0, 1700)
    assert found.keep_last(750) == Kept(6, 2.25, 600)  # three turns of two values
    assert found.advice(750)[0].endswith("keep the last 6 values on the device: saves 2.25 s, costs 600 B")


def test_what_is_waited_for_a_little_is_no_advice():
    assert Overlap((trip("a", 0.09),), step_s=10.0).advice() == ()
    assert Overlap((), step_s=10.0).advice() == ()


@pytest.mark.slow
def test_a_compiled_scan_has_a_window_for_each_turn():
    module = step("offload").module
    prediction = predict(module, CHIP)
    found = overlap(module, prediction)
    assert math.isclose(found.exposed_s, prediction.breakdown["host_copy"])
    (trip,) = found.trips
    assert (trip.bytes, trip.count, trip.late) == (2048 * 2048 * 2, 4, False)
    # The first layer's value waits three turns of either loop longer than the last one's.
    once = sum(row.exposed_s for row in prediction.rows if row.executions == 1)
    turns_s = (prediction.seconds - once) / 4
    assert trip.window_s is not None
    assert trip.longest_window_s is not None
    assert 0 < trip.window_s < turns_s
    assert math.isclose(trip.longest_window_s - trip.window_s, 3 * turns_s)

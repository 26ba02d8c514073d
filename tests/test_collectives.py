"""Collectives read from compiled programs made by hand, what runs beside them, and how reports show them."""

import dataclasses
import json
from typing import Any

from explanations import RECORD
from hlo_samples import CHIP, LAUNCH, LINK, add, close, hand_made

from remat_kit._communication import Collective, counts
from remat_kit._hlo.module import Module
from remat_kit._hlo.roofline import predict
from remat_kit._reasons import Pair
from remat_kit._record import Record, dump, load
from remat_kit._report import communication, html, text

SUM = Collective("all-reduce", "forward", "blocks/mlp", "bf16[8,64]", 1024, 8, 48, False, 2e-3, 5e-4)
AGAIN = dataclasses.replace(SUM, phase="recompute", again=True, count=24, seconds=1e-3, exposed_s=0.0)
ON_A_MESH = dataclasses.replace(
    RECORD, mesh={"tensor": 8}, collectives=(SUM, AGAIN), recompute_hidden_s=3e-4, recompute_exposed_s=7e-4
)


def test_a_record_keeps_its_collectives() -> None:
    (back,) = load(dump(ON_A_MESH))
    assert back.collectives == (SUM, AGAIN)
    assert (back.recompute_hidden_s, back.recompute_exposed_s) == (3e-4, 7e-4)
    # Those that an older version wrote have none, and unknown fields of a newer one are passed over.
    data: dict[str, Any] = json.loads(dump(ON_A_MESH))
    del data["collectives"], data["recompute_hidden_s"]
    assert Record.from_json(data).collectives == ()
    data["collectives"] = [{**dataclasses.asdict(SUM), "a_field_of_tomorrow": 1}]
    assert Record.from_json(data).collectives == (SUM,)


def test_collectives_are_counted_by_kind_and_phase() -> None:
    assert counts((SUM, AGAIN, SUM)) == {("all-reduce", "forward"): 96, ("all-reduce", "recompute"): 24}


def test_the_text_report_lists_them_and_what_they_hide() -> None:
    shown = text.render(ON_A_MESH)
    lines = {line.split("  ")[1] if line.startswith("  ") else line: line for line in shown.splitlines()}
    (row,) = [line for line in shown.splitlines() if "recompute (again)" in line]
    assert row.split()[:2] == ["all-reduce", "recompute"]
    assert "blocks/mlp" in row
    assert row.split()[-5:] == ["24", "1.00", "ms", "0.00", "µs"] or " 24 " in row
    assert "72" in lines["= a step"]
    assert "24 of them again" in lines["= a step"]
    assert "3.00 ms" in shown
    assert "500.0 µs of it exposed" in shown or "0.50 ms of it exposed" in shown
    assert "hidden behind it" in shown
    assert "all 8 devices together" in shown


def test_a_long_list_is_cut_and_says_so() -> None:
    many = tuple(dataclasses.replace(SUM, module=f"m_{i}") for i in range(communication.MOST + 3))
    lines = list(communication.lines(dataclasses.replace(ON_A_MESH, collectives=many)))
    assert f"  and 3 kinds more, {3 * 48} a step" in lines


def test_one_device_has_no_such_section() -> None:
    assert list(communication.lines(RECORD)) == []
    assert 'id="collectives"' not in html.render(RECORD)


def test_the_page_has_a_table_of_them() -> None:
    page = html.render(ON_A_MESH)
    assert '<a href="#collectives">Collectives</a>' in page
    section = page.partition('<section id="collectives"')[2].partition("</section>")[0]
    assert section.count("<tr>") == 1 + 2
    assert "blocks/mlp" in section
    assert "hidden behind it" in section


# A kernel of 12 MB takes 12 us of memory traffic on the round chip of the samples; what it runs beside is up to the
# order in which things stand.


def beside(order: str, size: int = 1 << 20) -> dict[str, tuple[float, float]]:
    """(seconds, seconds beside a collective) of each kernel; the order is of `start`, `done` and kernels `a`, `b`."""

    def main(computation: Any) -> int:
        add(computation, 1, "parameter", (size,))
        add(computation, 2, "parameter", (1 << 20,), parameter_number=1)
        number = 3
        start = 0
        for word in order.split():
            if word == "start":
                made = add(computation, number, "all-reduce-start", (size,), [1])
                made.collective_device_list.replica_groups.add(replica_ids=range(8))
                start = number
            elif word == "done":
                add(computation, number, "all-reduce-done", (size,), [start])
            else:
                add(computation, number, "tanh", (1 << 20,), [2]).name = word
            number += 1
        return number - 1

    prediction = predict(Module.from_proto(hand_made(main=main)), CHIP)
    return {row.name: (row.seconds, row.beside_s) for row in prediction.rows if row.kind != "collective"}


def test_kernels_between_start_and_done_run_beside_the_collective() -> None:
    found = beside("a start b done")
    assert found["a"][1] == 0
    # The ring takes 2 * 7/8 * 4 MiB over the link, longer than a kernel that reads and writes 4 MiB of memory each.
    assert found["b"][0] < 2 * 7 / 8 * 4 * (1 << 20) / LINK
    assert found["b"][1] == found["b"][0]


def test_only_as_long_as_it_is_under_way() -> None:
    small = 1 << 10
    found = beside("start a b done", small)
    under_way = 2 * 7 / 8 * 4 * small / LINK + LAUNCH
    assert under_way < found["a"][0]
    assert close(found["a"][1], under_way)
    assert found["b"][1] == 0


def test_nothing_runs_beside_what_is_over() -> None:
    assert beside("start done a b")["a"][1] == 0


def test_groups_larger_than_a_machine_are_warned_of() -> None:
    def main(computation: Any) -> int:
        add(computation, 1, "parameter", (1 << 20,))
        made = add(computation, 2, "all-reduce", (1 << 20,), [1])
        made.collective_device_list.replica_groups.add(replica_ids=range(64))
        return 2

    prediction = predict(Module.from_proto(hand_made(main=main)), CHIP)
    assert any("among 64 devices are predicted as if one machine held them all" in each for each in prediction.warnings)


def test_saved_bytes_of_all_devices_are_not_compared_with_the_need_of_one() -> None:
    # 5 MB less need of 1 GB. Of 80 MB kept for backward that is little; of a device's 10 MB it is half.
    base = dataclasses.replace(RECORD, need_bytes=10**9, saved_bytes=8 * 10**7, mesh={"device": 1})
    record = dataclasses.replace(base, need_bytes=10**9 - 5 * 10**6)
    assert Pair(record, base).is_small
    on_eight = [dataclasses.replace(each, mesh={"tensor": 8}) for each in (record, base)]
    assert not Pair(*on_eight).is_small

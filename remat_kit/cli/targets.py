"""`remat-kit targets`: the chips that a step can be compiled for."""

import dataclasses
import json

from rich.table import Table

from remat_kit.cli import _input, _output


def command(json_file: _input.JsonOption = None, force: _input.ForceOption = False) -> None:
    """List the targets with their main figures; --json has them all, with the source of each."""
    _output.check(json_file, force)
    from remat_kit._target import CHIPS, get_target
    from remat_kit._units import format_bytes

    chips = [*CHIPS.values(), get_target("cpu").chip]
    if json_file:
        data = [dataclasses.asdict(chip) for chip in chips]
        _output.write(json_file, json.dumps(data, indent=1, default=str) + "\n")
    table = Table("target", "device")
    for name in ("memory", "bf16 TFLOP/s", "memory GB/s", "host GB/s", "link GB/s"):
        table.add_column(name, justify="right")
    for chip in chips:
        bf16 = chip.flops_per_s.get("bf16")
        rates = (chip.memory_bytes_per_s, chip.host_bytes_per_s, chip.link_bytes_per_s)
        table.add_row(
            chip.name,
            chip.title,
            format_bytes(chip.memory_bytes),
            f"{bf16 / 1e12:,.0f}" if bf16 else "-",
            *(f"{rate / 1e9:,.0f}" if rate else "-" for rate in rates),
        )
    _output.show_table(table, json_file)
    _output.show("Peak dense rates, one direction. Also: attached, this machine's own device.\n", json_file)

"""What devices of a mesh send each other in one step: plain values, part of the record and of its JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """The collectives of a step that are equal in kind, phase, module and size.

    Attributes:
      kind: XLA's word: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, ...
      phase: forward, backward, recompute, update or unknown.
      module: path of the module, with `*` in the place of a repeated block's number; of several that XLA combined,
        that of the first.
      shape: what each device hands in, `bf16[8,512]`, several joined with ` + ` where XLA combined them.
      bytes: of that, one execution.
      devices: how many take part in one group.
      count: executions in one step, loops included. XLA may combine several of a program into one.
      again: whether forward has done it already, and backward does it again to recompute.
      seconds: predicted, of all executions, start-up included; None where the device is not known.
      exposed_s: predicted, what of it the kernels wait for; None where the device is not known.
    """

    kind: str
    phase: str
    module: str
    shape: str
    bytes: int
    devices: int
    count: int
    again: bool
    seconds: float | None
    exposed_s: float | None


def collectives_from_json(data: Any) -> tuple[Collective, ...]:
    """The collectives of a JSON list. Raises TypeError when one lacks fields; unknown ones are passed over."""
    names = {field.name for field in dataclasses.fields(Collective)}
    found = []
    for each in data or ():
        if not isinstance(each, Mapping):
            raise TypeError(f"Collective is {type(each).__name__}, not an object")
        found.append(Collective(**{name: value for name, value in each.items() if name in names}))
    return tuple(found)


def counts(collectives: Sequence[Collective]) -> dict[tuple[str, str], int]:
    """Executions in one step by (kind, phase)."""
    total: dict[tuple[str, str], int] = {}
    for each in collectives:
        key = (each.kind, each.phase)
        total[key] = total.get(key, 0) + each.count
    return total

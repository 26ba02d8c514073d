"""A record with a hand-made explanation, and the same step after an edit: for goldens, reports and comparisons."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from remat_kit._explanation import UNKNOWN, Advice, Buffer, Explanation, Floor, Holder, Moment, Program, Timeline
from remat_kit._record import Record
from remat_kit._units import GiB, KiB, MiB

MODEL = "models/transformer.py"


def holder(
    category: str, size: int, module: str = "", source: str = "", phase: str = "forward", shape: str = "", **rest: Any
) -> Holder:
    """A holder of one buffer of one layer, unless `rest` says otherwise."""
    return Holder(category, module, source, phase, shape, size, **{"buffers": 1, "layers": 1, **rest})


def categories_of(holders: Iterable[Holder]) -> dict[str, int]:
    """Bytes by category, as a record has them."""
    sizes: dict[str, int] = defaultdict(int)
    for each in holders:
        sizes[each.category] += each.bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


MOMENT = Moment(
    event=2841,
    events=5102,
    phase="backward",
    block="blocks",
    module="blocks/mlp",
    instruction="loop_fusion.114",
    computation="region_12.while_body",
    source=f"{MODEL}:203 (mlp)",
)
HOLDERS = (
    holder("optimizer state", 949 * MiB, "opt/mu", "", "argument", "f32[124439808]", buffers=2),
    holder("saved activations", 576 * MiB, "blocks/mlp", f"{MODEL}:203 (mlp)", "forward", "bf16[12,8,1024,3072]",
           layers=12),
    holder("parameters", 474 * MiB, "blocks/mlp/up", f"{MODEL}:201 (mlp)", "argument", "f32[12,768,3072]", layers=12),
    holder("saved activations", 432 * MiB, "blocks/attention", f"{MODEL}:164 (attend)", "forward",
           "bf16[12,3,8,12,1024,64]", layers=12),
    holder("loss head", 393 * MiB, "head", f"{MODEL}:97 (logits)", "forward", "bf16[8,1024,50304]"),
    holder("gradients", 237 * MiB, "blocks/mlp/up", f"{MODEL}:201 (mlp)", "backward", "f32[12,768,3072]", layers=12),
    holder("saved activations", 144 * MiB, "blocks", f"{MODEL}:120 (scan_blocks)", "forward", "bf16[12,8,1024,768]",
           layers=12),
    holder("recompute workspace", 96 * MiB, "blocks/attention", f"{MODEL}:171 (attend)", "recompute",
           "bf16[8,12,1024,1024]"),
    holder("backward workspace", 48 * MiB, "blocks/mlp", f"{MODEL}:203 (mlp)", "backward", "bf16[8,1024,3072]"),
    holder("collective buffers", 24 * MiB, "blocks/mlp/up", "", "backward", "f32[768,3072]", buffers=2),
    *(
        holder("other temporaries", (16 - 2 * number) * MiB, f"layer_*/a_long_module_name_{number}/and_one_below_it",
               f"/home/someone/projects/training/library/modules/part_{number}.py:{30 + number} (a_method_of_a_class)",
               "update", "f32[4,1024,1024]")
        for number in range(5)
    ),
    holder(UNKNOWN, 3 * KiB),
)  # fmt: skip
HOST_HOLDERS = (
    holder("saved activations", GiB, "blocks", f"{MODEL}:120 (scan_blocks)", "forward", "bf16[12,8,1024,768]",
           layers=12),
    holder("saved activations", 3 * MiB, "blocks/attention", f"{MODEL}:164 (attend)", "forward", "f32[12,8,1024]",
           layers=12),
)  # fmt: skip
FLOOR = Floor(
    argument_bytes=1424 * MiB,
    output_bytes=500,
    constant_bytes=4,
    transient_bytes=512 * MiB,
    transient_phase="backward",
    transient_module="head",
    bytes=1936 * MiB + 504,
)
ADVICE = (
    Advice("donate", "state (argument 0)", 1423 * MiB, "Give donate=(0,) to the Step, so that the update works in "
           "place: the outputs then take the memory of the arguments."),
    Advice("chunk the loss head", "head", 344 * MiB, "Compute logits and loss in 8 pieces along the batch."),
    Advice("recompute", "mlp_up", 192 * MiB, "Leave out mlp_up of what the policy saves."),
)  # fmt: skip
PROGRAM = Program(
    module="jit_step",
    instructions=4210,
    devices=1,
    matmul_flops=7_300_000_000_000,
    recompute_matmul_flops=309_237_645_312,
    donated_bytes=1423 * MiB,
    temp_allocations=1,
    xla_remat_clones=0,
)
_PEAK = sum(each.bytes for each in HOLDERS)
EXPLANATION = Explanation(
    peak=MOMENT,
    holders=HOLDERS,
    host_holders=HOST_HOLDERS,
    module_share=0.9999,
    source_share=0.712,
    floor=FLOOR,
    advice=ADVICE,
    program=PROGRAM,
    buffers=(
        Buffer("fusion.9", 576 * MiB, "saved activations", "blocks/mlp", "blocks", f"{MODEL}:203 (mlp)", "forward",
               "bf16[12,8,1024,3072]", "bf16", 12, 40, 4000),
    ),
    timeline=Timeline(
        events=(0, 2841, 5101),
        bytes={"parameters": (474 * MiB,) * 3, "saved activations": (0, _PEAK - 474 * MiB, 0)},
        phases=("forward", "backward", "update"),
        modules=("embed", "blocks/mlp", ""),
        instructions=("fusion.1", "loop_fusion.114", "fusion.7"),
    ),
)  # fmt: skip


def explained(holders: tuple[Holder, ...] = HOLDERS, changes: Mapping[str, Any] | None = None, **rest: Any) -> Record:
    """The sample's record with other holders; `changes` are the explanation's fields, `rest` the record's."""
    peak = sum(each.bytes for each in holders)
    argument, output, alias = 1424 * MiB, 1423 * MiB + 500, 1423 * MiB
    need = peak + 40 * KiB
    fields: dict[str, Any] = {
        "argument_bytes": argument,
        "output_bytes": output,
        "alias_bytes": alias,
        "temp_bytes": need - argument - output + alias,
        "host_temp_bytes": sum(each.bytes for each in HOST_HOLDERS),
        "need_bytes": need,
        "constant_bytes": 4,
        "live_peak_bytes": peak,
        "live_peak_phase": "backward",
        "xla_peak_bytes": peak,
        "categories": categories_of(holders),
        "attributed_share": 1 - 3 * KiB / peak,
        "explanation": dataclasses.replace(EXPLANATION, holders=holders, **(changes or {})),
        "saved_bytes": 1152 * MiB,
        "saved_bytes_per_block": 96 * MiB,
        "model_flops": 6_999_559_372_800,
        "step_flops": 7_308_797_018_112,
        "recompute_flops": 309_237_645_312,
        "recomputed_matmuls": 24,
        "predicted_step_s": 0.0451,
        "predicted_breakdown_s": {"matmul": 0.0081, "memory": 0.0325, "launch": 0.0045},
        "capacity_bytes": 74 * GiB,
        "fits": "yes",
        "margin_bytes": 74 * GiB - need,
        "assumptions": ("Nothing else uses the device.",),
    }
    record = Record(
        workload="models.transformer:gpt",
        options={"batch": 8, "size": "gpt2-small"},
        policy="selective_attention",
        target="h100-sxm-80gb",
        mesh={"device": 1},
        versions={"jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.12"},
    )
    return dataclasses.replace(record, **{**fields, **rest})


RECORD = explained()
"""The sample."""

_SHIFT = 4


def _edited() -> tuple[Holder, ...]:
    """The holders after an edit: four lines more above `mlp`, its stack in float32, attention's stack is gone."""
    found = []
    for each in HOLDERS:
        if each.module == "blocks/attention" and each.category == "saved activations":
            continue
        if "(mlp)" in each.source:
            line = int(each.source.split(":")[1].split()[0])
            each = dataclasses.replace(each, source=each.source.replace(str(line), str(line + _SHIFT)))
        if each.category == "saved activations" and each.module == "blocks/mlp":
            each = dataclasses.replace(each, bytes=2 * each.bytes)
        if each.category == "gradients":
            each = dataclasses.replace(each, bytes=each.bytes - 37 * MiB)
        found.append(each)
    found.append(holder("saved activations", 24 * MiB, "blocks/norm", f"{MODEL}:150 (norm)", shape="f32[12,8,1024,1]"))
    return tuple(sorted(found, key=lambda each: -each.bytes))


EDITED = explained(
    _edited(),
    changes={"program": dataclasses.replace(PROGRAM, instructions=4290, temp_allocations=2, donated_bytes=0)},
    policy="full",
    options={"batch": 8, "size": "gpt2-small", "seq": 1024},
    versions={"jax": "0.12.1", "jaxlib": "0.12.0", "flax": "0.12.12"},
    xla_remat="fired",
    gemm_backend="triton",
    compile_options={"xla_gpu_autotune_level": "0"},
    recompute_flops=2 * 10**12,
    predicted_step_s=0.0502,
)
"""The same step after an edit, with another policy, another JAX and other settings."""

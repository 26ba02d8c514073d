"""Records for the HTML report: a training step of GPT-2 whose heap is played event by event, so that all sums hold."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from remat_kit._explanation import Advice, Buffer, Explanation, Floor, Holder, Moment, Program, Timeline
from remat_kit._record import Record
from remat_kit._units import GiB, KiB, MiB

_ATTENTION, _MLP = "models/parts.py:{} (Attention.__call__)", "models/parts.py:{} (Mlp.__call__)"


@dataclass
class Heap:
    """Buffers in the order in which they came; `now` is the number of the next event."""

    buffers: list[Buffer] = field(default_factory=list)
    moments: list[tuple[str, str, str]] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)

    @property
    def now(self) -> int:
        return len(self.moments)

    def alloc(self, op: str, size: int, category: str, module: str, phase: str, shape: str, **more: object) -> int:
        """Opens a buffer at an event of its own; its place in `buffers`."""
        self.names[op] += 1
        name = f"{op}.{self.names[op]}"
        values = {"block": "", "source": "", "layers": 1, "born": self.now, "dies": -1, **more}
        self.buffers.append(
            Buffer(name, size, category, module, phase=phase, shape=shape, dtype=shape.partition("[")[0], **values)  # type: ignore[arg-type]
        )
        if phase != "argument":
            self.moments.append((phase, module, name))
        return len(self.buffers) - 1

    def free(self, *places: int) -> None:
        """Closes buffers, one event each."""
        for place in places:
            buffer = self.buffers[place]
            self.buffers[place] = dataclasses.replace(buffer, dies=self.now)
            self.moments.append(self.moments[-1] if self.moments else ("forward", "", ""))


def gpt2(
    *, layers: int = 12, policy: str = "full", root: str = "Gpt", points: int = 600, listed: int | None = None
) -> Record:
    """A record of GPT-2 small with `layers` blocks. Under "full" a block keeps its input, under "none" all it makes."""
    heap, width, vocab, batch, seq = Heap(), 768, 50257, 8, 512
    tokens = batch * seq
    arguments = _arguments(heap, layers, width, vocab, batch, seq, root)
    hidden, wide, square = tokens * width * 2, tokens * 4 * width * 2, batch * 12 * seq * seq * 2
    shapes = {
        "hidden": f"bf16[{batch},{seq},{width}]",
        "wide": f"bf16[{batch},{seq},{4 * width}]",
        "scores": f"bf16[{batch},12,{seq},{seq}]",
    }

    def block(index: int, phase: str, keep: bool) -> list[int]:
        """Runs a block's forward; what is kept of it."""
        category = {True: "saved activations", False: "recompute workspace"}[keep]
        if phase == "forward" and not keep:
            category = "forward workspace"
        made = []
        for part, op, size, shape, line in (
            ("LayerNorm_0", "fusion", hidden, "hidden", 61),
            ("Attention_0/Dense_qkv", "cublas-gemm", 3 * hidden, "hidden", 88),
            ("Attention_0", "cublas-batch-gemm", square, "scores", 97),
            ("Attention_0", "softmax_fusion", square, "scores", 101),
            ("Attention_0/Dense_out", "cublas-gemm", hidden, "hidden", 109),
            ("Mlp_0/Dense_up", "cublas-gemm", wide, "wide", 131),
            ("Mlp_0", "gelu_fusion", wide, "wide", 133),
        ):
            source = (_MLP if "Mlp" in part else _ATTENTION).format(line)
            where = f"{root}/Block_{index}/{part}"
            names = {"block": f"Block_{index}", "source": source}
            made.append(heap.alloc(op, size, category, where, phase, shapes[shape], **names))
        return made

    kept: list[list[int]] = []
    embed = {"source": "models/transformer.py:42 (Gpt.__call__)"}
    first = heap.alloc(
        "gather_fusion", hidden, "saved activations", f"{root}/Embed_0", "forward", shapes["hidden"], **embed
    )
    for index in range(layers):
        made = block(index, "forward", keep=policy == "none")
        stays = made if policy == "none" else []
        heap.free(*(place for place in made if place not in stays))
        carry = {"block": f"Block_{index}", "source": "models/parts.py:150 (Block.__call__)"}
        out = heap.alloc(
            "add_fusion", hidden, "saved activations", f"{root}/Block_{index}", "forward", shapes["hidden"], **carry
        )
        kept.append([*stays, out])
    logits = tokens * vocab * 4
    head = {"source": "models/transformer.py:77 (loss)"}
    loss = [
        heap.alloc(
            "cublas-gemm",
            logits // 2,
            "loss head",
            f"{root}/lm_head",
            "forward",
            f"bf16[{batch},{seq},{vocab}]",
            **head,
        ),
        heap.alloc(
            "softmax_fusion",
            logits // 2,
            "loss head",
            f"{root}/lm_head",
            "forward",
            f"bf16[{batch},{seq},{vocab}]",
            **head,
        ),
    ]
    gradients = [
        heap.alloc(
            "cublas-gemm",
            vocab * width * 2,
            "gradients",
            f"{root}/Embed_0",
            "backward",
            f"bf16[{vocab},{width}]",
            **head,
        )
    ]
    heap.free(*loss)
    for index in reversed(range(layers)):
        again = block(index, "recompute", keep=False) if policy != "none" else []
        names = {"block": f"Block_{index}", "source": _MLP.format(131)}
        for part, size, shape in (
            ("Mlp_0", wide, "wide"),
            ("Attention_0", square, "scores"),
            ("LayerNorm_0", hidden, "hidden"),
        ):
            module = f"{root}/Block_{index}/{part}"
            scratch = heap.alloc("loop_fusion", size, "backward workspace", module, "backward", shapes[shape], **names)
            parameters = width * width * (8 if part == "Mlp_0" else 4)
            if part != "LayerNorm_0":
                gradients.append(
                    heap.alloc(
                        "cublas-gemm",
                        parameters * 2,
                        "gradients",
                        module,
                        "backward",
                        f"bf16[{width},{parameters // width}]",
                        **names,
                    )
                )
            heap.free(scratch)
        heap.free(*again, *kept[index])
    heap.free(first)
    for place in gradients:
        scratch = heap.alloc(
            "adam_fusion",
            heap.buffers[place].bytes * 2,
            "other temporaries",
            heap.buffers[place].module,
            "update",
            "f32[768]",
        )
        heap.free(scratch, place)
    odd = heap.alloc("copy", 768 * KiB, "not attributed", "", "update", "f32[196608]")
    heap.free(odd)
    end = heap.now
    for place in arguments:
        heap.buffers[place] = dataclasses.replace(heap.buffers[place], dies=end)
    return _record(heap, batch=batch, seq=seq, layers=layers, policy=policy, points=points, listed=listed)


def _arguments(heap: Heap, layers: int, width: int, vocab: int, batch: int, seq: int, root: str) -> list[int]:
    found = [heap.alloc("tokens", batch * (seq + 1) * 4, "batch", "", "argument", f"s32[{batch},{seq + 1}]")]
    shapes = [(f"{root}/Embed_0", "", vocab, width)]
    for index in range(layers):
        name = f"Block_{index}"
        shapes += [
            (f"{root}/{name}/Attention_0/Dense_qkv", name, width, 3 * width),
            (f"{root}/{name}/Attention_0/Dense_out", name, width, width),
            (f"{root}/{name}/Mlp_0/Dense_up", name, width, 4 * width),
            (f"{root}/{name}/Mlp_0/Dense_down", name, 4 * width, width),
        ]
    for module, block, rows, columns in shapes:
        for leaf, category in (("kernel", "parameters"), ("mu", "optimizer state"), ("nu", "optimizer state")):
            shape = f"f32[{rows},{columns}]"
            source = {"block": block, "source": "models/parts.py:88 (Attention.__call__)"}
            found.append(heap.alloc(f"param_{leaf}", rows * columns * 4, category, module, "argument", shape, **source))
    return found


def _record(heap: Heap, *, batch: int, seq: int, layers: int, policy: str, points: int, listed: int | None) -> Record:
    alive = [0] * (heap.now + 1)
    for buffer in heap.buffers:
        alive[buffer.born] += buffer.bytes
        alive[buffer.dies] -= buffer.bytes
    total, totals = 0, []
    for change in alive[:-1]:
        total += change
        totals.append(total)
    peak = max(range(heap.now), key=totals.__getitem__)
    at_peak = [buffer for buffer in heap.buffers if buffer.born <= peak < buffer.dies]
    categories = Counter[str]()
    for buffer in at_peak:
        categories[buffer.category] += buffer.bytes
    others = sorted((buffer for buffer in heap.buffers if buffer not in at_peak), key=lambda buffer: -buffer.bytes)
    shown = sorted([*at_peak, *others][:listed], key=lambda buffer: (-buffer.bytes, buffer.name))
    arguments = sum(buffer.bytes for buffer in heap.buffers if buffer.phase == "argument")
    floor = arguments + 600 * MiB
    phase, module, instruction = heap.moments[peak]
    temp, capacity = totals[peak] - arguments + 90 * MiB, 74 * GiB
    need = arguments + temp
    source = "models/transformer.py:77 (loss)"
    chunks = "compute logits and loss in 8 chunks of the sequence, in a scan whose body is rematerialized"
    offload = "use --policy offload_block_input: each block's input waits in host memory"
    explanation = Explanation(
        peak=Moment(peak, heap.now, phase, _block(module), module, instruction, "main.1024", source),
        holders=_holders(at_peak),
        host_holders=(),
        module_share=0.982,
        source_share=0.969,
        floor=Floor(arguments, 0, 0, 600 * MiB, "backward", "Gpt/lm_head", floor),
        advice=(
            Advice("chunk the loss head", "Gpt/lm_head", 692 * MiB, chunks),
            Advice("shard", "optimizer state", 640 * MiB, "shard mu and nu over two devices"),
            Advice("offload", "saved activations", 72 * MiB, offload),
        ),
        program=Program("jit_step", 2417, 1, 7 * 10**12, 2 * 10**12, arguments, 1, 0),
        buffers=tuple(shown),
        timeline=_timeline(heap, peak, points),
    )  # fmt: skip
    return Record(
        workload="models.transformer:gpt",
        options={"size": "gpt2-small", "layers": layers, "batch": batch, "seq": seq},
        policy=policy,
        target="h100-sxm-80gb",
        mesh={"device": 1},
        versions={"jax": "0.12.0.1", "jaxlib": "0.12.0", "flax": "0.12.12", "plugin": "0.12.0"},
        argument_bytes=arguments,
        output_bytes=arguments,
        alias_bytes=arguments,
        temp_bytes=temp,
        need_bytes=need,
        live_peak_bytes=totals[peak],
        live_peak_phase=phase,
        categories=dict(categories),
        attributed_share=0.9996,
        explanation=explanation,
        saved_bytes=13 * batch * seq * 768 * 2,
        saved_bytes_per_block=batch * seq * 768 * 2,
        model_flops=7 * 10**12,
        step_flops=9 * 10**12,
        recompute_flops=2 * 10**12,
        recomputed_matmuls=72,
        predicted_step_s=0.0431,
        predicted_breakdown_s={"matmul": 0.03, "memory": 0.01, "launch": 0.0031},
        trace_s=0.41,
        compile_s=8.2,
        analyze_s=0.3,
        capacity_bytes=capacity,
        fits="yes",
        margin_bytes=capacity - need,
        assumptions=(
            "Nothing else uses the device.",
            "1 GiB of the device is left to CUDA's context and library handles.",
        ),
        warnings=("Fused attention has no known workspace without a device; need is a lower bound there.",),
    )


def _block(module: str) -> str:
    return next((part for part in module.split("/") if part.startswith("Block_")), "")


def _holders(buffers: list[Buffer]) -> tuple[Holder, ...]:
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in buffers:
        module = buffer.module.replace(buffer.block, "Block_*") if buffer.block else buffer.module
        groups.setdefault((buffer.category, module, buffer.source, buffer.phase, buffer.shape), []).append(buffer)
    found = [
        Holder(*key, sum(each.bytes for each in group), len(group), sum(each.layers for each in group))
        for key, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda holder: (-holder.bytes, holder.module)))


def _timeline(heap: Heap, peak: int, points: int) -> Timeline:
    last = heap.now - 1
    events = sorted({peak, *(round(index * last / (points - 1)) for index in range(points))})
    series: dict[str, list[int]] = {}
    for buffer in heap.buffers:
        values = series.setdefault(buffer.category, [0] * len(events))
        for place, event in enumerate(events):
            if buffer.born <= event < buffer.dies:
                values[place] += buffer.bytes
    moments = [heap.moments[event] for event in events]
    return Timeline(
        tuple(events),
        {name: tuple(values) for name, values in series.items()},
        tuple(moment[0] for moment in moments),
        tuple(moment[1] for moment in moments),
        tuple(moment[2] for moment in moments),
    )


def large() -> Record:
    """A program of 40,000 instructions: 600 points, 14 categories and more, 3,000 buffers, deep module paths."""
    record = gpt2(layers=96, root="train_step/Model_0/Decoder_0/Transformer_0/CheckpointedStack_0", listed=3000)
    explanation = record.explanation
    assert explanation is not None
    assert explanation.timeline is not None
    spare = ("collective buffers", "host-offloaded", "outputs", "constants", "forward workspace", "recompute workspace")
    timeline = explanation.timeline
    present = dict(timeline.bytes)
    for name in spare:
        present.setdefault(name, tuple(1234567891 + 7 * place for place in range(len(timeline.events))))
    buffers = list(explanation.buffers)
    while len(buffers) < 3000:
        each = buffers[len(buffers) % 977]
        buffers.append(dataclasses.replace(each, name=f"{each.name}.remat{len(buffers)}", born=0, dies=0))
    explanation = dataclasses.replace(
        explanation,
        buffers=tuple(buffers),
        timeline=dataclasses.replace(timeline, bytes=present),
        program=dataclasses.replace(explanation.program, instructions=40_000),
    )
    return dataclasses.replace(record, explanation=explanation)

"""What does PyTorch's `activation_memory_budget` keep of a GPT block, and what does it compute again?

    make bench-torch
    .venv-torch/bin/python experiments/torch_budget.py [key=value ...] [--steps 20] [--out FILE]

Runs in an environment of its own, with PyTorch and without JAX. The block of `models/parts.py`, style "gpt", goes
forward and backward on the CPU through `torch.compile`, once for each budget. The backend is AOTAutograd with what
`torch.compile` has by default: Inductor's decompositions, its passes over the joint graph, and then
`min_cut_rematerialization_partition`. The two graphs that come out run as they are, without code generation.

A budget is a share, not bytes. By `torch/_functorch/partitioners.py`: 1 is the min-cut over what may not be recomputed,
which recomputes no matrix product. 0 keeps the inputs alone. Between them the budget is multiplied by the bytes that 1
keeps beyond the inputs; when one of two min-cuts that only recompute what is fused is below that, it is taken as it is.
Else a knapsack (solver "dp") chooses which of the values that a min-cut must not recompute may be recomputed after all:
each counts its own bytes, and as run time its own FLOPs (estimator "flops", at least 1), whether or not its inputs
are kept; and a last min-cut decides.

Saved bytes are those of the tensors that the forward graph returns for backward, each storage once. Primals, the
block's parameters and its input, live on whatever is decided, and are counted apart. FLOPs are those of `mm`, `addmm`,
`bmm` and `baddbmm` in the two graphs, 2 for a multiply-add; recomputed is what both have beyond budget 1.
"""

import argparse
import json
import math
import pathlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from functorch.compile import make_boxed_func  # pyright: ignore[reportMissingImports]
from torch._dynamo.backends.common import aot_autograd  # pyright: ignore[reportMissingImports]
from torch._functorch import config as functorch_config  # pyright: ignore[reportMissingImports]
from torch._inductor.compile_fx import partition_fn  # pyright: ignore[reportMissingImports]
from torch._inductor.decomposition import select_decomp_table  # pyright: ignore[reportMissingImports]

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "experiments/results/torch_budget.json"
SIZES = {"width": 768, "heads": 12, "mlp_width": 3072, "seq": 512, "batch": 4}
CHECKED = {"width": 16, "heads": 2, "mlp_width": 24, "seq": 8, "batch": 2}
"""A block so small that its gradients are compared with JAX's, in float32."""
EPSILON = 1e-5
SHAPES = {
    "attention_norm/scale": "D", "attention_norm/bias": "D",
    "attention/query/kernel": "DD", "attention/query/bias": "D",
    "attention/key/kernel": "DD", "attention/key/bias": "D",
    "attention/value/kernel": "DD", "attention/value/bias": "D",
    "attention/out/kernel": "DD", "attention/out/bias": "D",
    "mlp_norm/scale": "D", "mlp_norm/bias": "D",
    "mlp/up/kernel": "DF", "mlp/up/bias": "F", "mlp/down/kernel": "FD", "mlp/down/bias": "D",
}  # fmt: skip
"""Parameters of the block by the path that they have in `models/parts.py`: D model width, F MLP width."""


class Block(torch.nn.Module):
    """`models.parts.Block` of style "gpt" without dropout: float32 parameters, cast inside to the input's dtype."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self.heads = sizes["heads"]
        dims = {"D": sizes["width"], "F": sizes["mlp_width"]}
        for number, (path, letters) in enumerate(sorted(SHAPES.items())):
            shape = [dims[letter] for letter in letters]
            self.register_parameter(path.replace("/", "_"), torch.nn.Parameter(numbers(shape, number)))

    def __getitem__(self, path: str) -> Any:
        return getattr(self, path.replace("/", "_"))

    def norm(self, x_BTD: Any, path: str) -> Any:
        """LayerNorm with statistics in float32, cast back. [B, T, D]"""
        wide_BTD = x_BTD.float()
        centred_BTD = wide_BTD - wide_BTD.mean(dim=-1, keepdim=True)
        variance_BT1 = centred_BTD.square().mean(dim=-1, keepdim=True)
        normal_BTD = centred_BTD * torch.rsqrt(variance_BT1 + EPSILON)
        return (normal_BTD * self[f"{path}/scale"] + self[f"{path}/bias"]).to(x_BTD.dtype)

    def dense(self, x_BTD: Any, path: str) -> Any:
        """`x @ kernel + bias` in the dtype of `x_BTD`. [B, T, E]"""
        return x_BTD @ self[f"{path}/kernel"].to(x_BTD.dtype) + self[f"{path}/bias"].to(x_BTD.dtype)

    def attention(self, x_BTD: Any) -> Any:
        """Causal attention with scores and probabilities as tensors; softmax in float32, cast back. [B, T, D]"""
        B, T, D = x_BTD.shape
        C = D // self.heads
        names = ("query", "key", "value")
        q_BHTC, k_BHSC, v_BHSC = (
            self.dense(x_BTD, f"attention/{name}").view(B, T, self.heads, C).transpose(1, 2) for name in names
        )
        scores_BHTS = (q_BHTC @ k_BHSC.transpose(2, 3)).float() * C**-0.5
        mask_TS = torch.zeros(T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).tril().logical_not(), -math.inf)
        weights_BHTS = torch.softmax(scores_BHTS + mask_TS, dim=-1).to(x_BTD.dtype)
        context_BTD = (weights_BHTS @ v_BHSC).transpose(1, 2).reshape(B, T, D)
        return self.dense(context_BTD, "attention/out")

    def forward(self, x_BTD: Any) -> Any:
        """[B, T, D], of the dtype of `x_BTD`."""
        x_BTD = x_BTD + self.attention(self.norm(x_BTD, "attention_norm"))
        up_BTF = self.dense(self.norm(x_BTD, "mlp_norm"), "mlp/up")
        return x_BTD + self.dense(torch.nn.functional.gelu(up_BTF, approximate="tanh"), "mlp/down")


def numbers(shape: Sequence[int], which: int) -> Any:
    """A float32 tensor of values below 0.2 that any framework can make: 0.2·sin(0.7·index + which)."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.2 * torch.sin(0.7 * index + which)).float().reshape(*shape)


def flops_of(node: Any) -> int:
    """FLOPs of one node of a graph; 0 for what is no matrix product.

    Raises NotImplementedError for an operation that may hold matrix products and is not counted.
    """
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left = node.args[1 if name in ("addmm", "baddbmm") else 0]
        return 2 * math.prod(node.meta["val"].shape) * left.meta["val"].shape[-1]
    if any(part in name for part in ("matmul", "attention", "conv", "linear", "einsum", "mm", "mv", "dot")):
        if name == "convert_element_type":
            return 0
        raise NotImplementedError(f"{name} may hold matrix products: add its formula to experiments/torch_budget.py")
    return 0


def products(graph: Any) -> list[tuple[str, int]]:
    """(name, FLOPs) of each matrix product of a graph."""
    return [(node.name, flops) for node in graph.nodes if (flops := flops_of(node))]


def saved_tensors(forward: Any, num_outputs: int) -> tuple[list[dict[str, Any]], int]:
    """What a forward graph returns for backward beside primals, and the bytes of primals among it.

    A storage counts once: a second view of it, or a view of a primal, is listed with 0 bytes.
    """
    (output,) = forward.graph.find_nodes(op="output")
    seen = {storage(node) for node in forward.graph.find_nodes(op="placeholder")}
    found, primal_bytes = [], 0
    for node in output.args[0][num_outputs:]:
        value = node.meta["val"]
        if node.op == "placeholder":
            primal_bytes += value.numel() * value.element_size()
            continue
        size = 0 if storage(node) in seen else value.untyped_storage().nbytes()
        seen.add(storage(node))
        dtype = str(value.dtype).removeprefix("torch.")
        found.append({"name": node.name, "shape": list(value.shape), "dtype": dtype, "bytes": size})
    return sorted(found, key=lambda each: -each["bytes"]), primal_bytes


def storage(node: Any) -> Any:
    """What two views of one tensor share."""
    return node.meta["val"].untyped_storage()._cdata


def step(sizes: Mapping[str, int], dtype: Any, budget: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the partitioner decided for one budget, the block's output and gradients by path), of a step that ran."""
    row: dict[str, Any] = {"budget": budget}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        start = time.perf_counter()
        free_inputs = len(options.get("static_lifetime_input_indices") or ())
        forward, backward = partition_fn(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        row["partition_s"] = round(time.perf_counter() - start, 3)
        row["free_inputs"] = free_inputs
        saved, row["saved_primal_bytes"] = saved_tensors(forward, num_fwd_outputs)
        row["saved_bytes"] = sum(each["bytes"] for each in saved)
        in_forward, in_backward = products(forward.graph), products(backward.graph)
        row["forward_flops"] = sum(flops for _, flops in in_forward)
        row["backward_flops"] = sum(flops for _, flops in in_backward)
        both = {name for name, _ in in_forward} & {name for name, _ in in_backward}
        row["recomputed"] = sorted(both)
        row["saved"] = saved
        return forward, backward

    torch._dynamo.reset()
    block = Block(sizes)
    x_BTD = numbers([sizes["batch"], sizes["seq"], sizes["width"]], len(SHAPES)).to(dtype).requires_grad_()
    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    with functorch_config.patch(activation_memory_budget=budget):
        y_BTD = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(x_BTD)
        y_BTD.backward(numbers(y_BTD.shape, len(SHAPES) + 1).to(dtype))
    gradients = {path: block[path].grad for path in SHAPES} | {"input": x_BTD.grad}
    return row, {"output": y_BTD.detach(), **gradients}


def as_it_is(graph: Any, _: Any) -> Any:
    """A compiler that runs the graph operation by operation."""
    return make_boxed_func(graph.forward)


def sums(values: Mapping[str, Any]) -> dict[str, float]:
    """The sum over each tensor times 1, 2, ..., so that an element in another place would show."""
    weighted = {
        name: (value.double().flatten() * torch.arange(1, value.numel() + 1)).sum() / value.numel()
        for name, value in values.items()
    }
    return {name: float(f"{value.item():.7g}") for name, value in weighted.items()}


def measure(sizes: Mapping[str, int], steps: int) -> dict[str, Any]:
    """Everything that is kept: sizes, versions, settings, and a row for each of the budgets 0, 1/steps, ..., 1."""
    small = {str(budget): sums(step(CHECKED, torch.float32, budget)[1]) for budget in (0.0, 1.0)}
    rows = []
    for number in range(steps + 1):
        row, _ = step(sizes, torch.bfloat16, number / steps)
        rows.append(row)
        print(f"budget {row['budget']:.2f}: {row['saved_bytes'] / 2**20:8.2f} MiB saved", file=sys.stderr)
    least = rows[-1]["forward_flops"] + rows[-1]["backward_flops"]
    for row in rows:
        row["recomputed_flops"] = row["forward_flops"] + row["backward_flops"] - least
    return {
        "format": 1,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": {
            "partitioner": "min_cut_rematerialization_partition",
            "decompositions": "inductor",
            "solver": functorch_config.activation_memory_budget_solver,
            "runtime_estimator": functorch_config.activation_memory_budget_runtime_estimator,
            "parameters_are_free_to_save": functorch_config.treat_parameters_as_free_to_save,
        },
        "sizes": dict(sizes),
        "dtypes": {"compute": "bfloat16", "parameters": "float32"},
        "check": {"sizes": CHECKED, "dtype": "float32", "sums_by_budget": small},
        "rows": rows,
    }


def main() -> int:
    """0 when every budget went through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", metavar="key=value", help=f"{', '.join(SIZES)}: whole numbers")
    parser.add_argument("--steps", type=int, default=20, help="budgets are 0, 1/steps, ..., 1")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    given = dict(each.split("=", 1) for each in arguments.sizes)
    if unknown := given.keys() - SIZES.keys():
        parser.error(f"unknown size {', '.join(sorted(unknown))}. Sizes are {', '.join(SIZES)}.")
    sizes = SIZES | {name: int(value) for name, value in given.items()}
    torch.set_num_threads(1)
    result = measure(sizes, arguments.steps)
    arguments.out.write_text(as_text(result))
    return 0


def as_text(result: Mapping[str, Any]) -> str:
    """JSON with a line for each saved tensor."""
    rows = []
    for row in result["rows"]:
        saved = ",\n    ".join(json.dumps(each) for each in row["saved"])
        head = json.dumps({name: value for name, value in row.items() if name != "saved"})
        rows.append(f'  {head[:-1]}, "saved": [\n    {saved}\n  ]}}' if saved else f'  {head[:-1]}, "saved": []}}')
    head = ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items() if name != "rows")
    listed = ",\n".join(rows)
    text = f'{{{head},\n "rows": [\n{listed}\n ]}}\n'
    assert json.loads(text) == result
    return text


if __name__ == "__main__":
    sys.exit(main())

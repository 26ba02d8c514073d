"""Module paths: read from the names that JAX gives to instructions and to the arguments of a step.

An instruction's name is a path of scopes with JAX's own transformations between them and the primitive at its end:

  jit(step)/transpose(jvp(block_0))/jvp(block_0)/checkpoint/rematted_computation/mlp/jit(gelu)/mul
    is in block_0/mlp;
  jit(step)/jvp(Model)/while/body/eval_jaxpr/ScanBlock_0.lifted/ScanBlock_0/Dense_0/dot_general
    is in Model/ScanBlock_0/Dense_0.

An argument's name is the path of its leaf: `state.params['blocks'][3]['mlp']['kernel']`.
"""

import functools
import re

# What JAX writes between scopes: loops, calls, and the marks of its transformations.
_NOT_A_SCOPE = frozenset({
    "", "while", "body", "cond", "scan", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2",
    "rematted_computation", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "pjit", "jit", "shard_map",
    "jvp", "transpose", "vmap", "while_body", "while_cond", "named_call", "xla_call", "fwd", "bwd", "lifted",
})  # fmt: skip
_WRAPPERS = frozenset({"jvp", "transpose", "vmap", "pmap", "linearize", "custom_jvp", "custom_vjp", "rematted"})
_LONGEST = 128
"""Parts of a name that are looked at: no model is as deep."""
_BRANCH = re.compile(r"branch_\d+_fun$")
_SCOPE = re.compile(r"[\w<>\-]+$")
_NUMBERED = re.compile(r"^(.*?)_?(\d+)$")
_KEY = re.compile(r"\[\\?['\"]([^'\"\\]*)\\?['\"]\]|\[(\d+)\]|\.?([^.\[\]]+)")


@functools.lru_cache(maxsize=1 << 16)
def module_path(op_name: str) -> tuple[str, ...]:
    """The scopes of an instruction's name, outermost first; () when it has none."""
    path: list[str] = []
    for part in op_name.split("/")[:-1][:_LONGEST]:
        start = 0
        while (end := part.find("(", start)) > 0 and part[start:end] in _WRAPPERS:
            start = end + 1
        part = part[start:].partition(".")[0].rstrip(")")  # Linen's `Block_0.lifted` and `Block_0.__call__`
        if part in _NOT_A_SCOPE or not _SCOPE.match(part) or _BRANCH.match(part):
            continue
        if not path or path[-1] != part:
            path.append(part)
    # Differentiating a checkpointed function writes the scopes around it twice.
    for length in range(len(path) // 2, 0, -1):
        if path[:length] == path[length : 2 * length]:
            return tuple(path[length:])
    return tuple(path)


@functools.lru_cache(maxsize=1 << 16)
def argument_keys(name: str) -> tuple[str, ...]:
    """The keys of an argument's name: ("state", "params", "blocks", "3", "mlp", "kernel")."""
    return tuple(quoted or number or word for quoted, number, word in _KEY.findall(name))


def path_of_keys(keys: tuple[str, ...]) -> str:
    """Keys as a module path: a number belongs to the key before it, `blocks_3/mlp`."""
    path: list[str] = []
    for key in keys:
        if key.isdecimal() and path:
            path[-1] += f"_{key}"
        else:
            path.append(key)
    return "/".join(path)


def split_number(component: str) -> tuple[str, int] | None:
    """("block", 3) from "block_3"; None without a number at the end, or for a number alone."""
    match = _NUMBERED.match(component)
    return (match[1], int(match[2])) if match and match[1] else None


def starred(path: str, block: str) -> str:
    """`path` with the number of its block as `*`: the same for all blocks of a stack."""
    split = split_number(block)
    if split is None:
        return path
    return "/".join(f"{split[0]}_*" if part == block else part for part in path.split("/"))

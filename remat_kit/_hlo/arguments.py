"""The arguments of a program: what each holds, and which module owns it."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from remat_kit._hlo.flow import Flow
from remat_kit._hlo.module import Module
from remat_kit._hlo.scope import argument_keys, path_of_keys, split_number
from remat_kit._hlo.structure import BATCH, PARAMETER, STATE, structure_of
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, UPDATE

PARAMETERS, OPTIMIZER_STATE, BATCH_CATEGORY, ARGUMENTS = "parameters", "optimizer state", "batch", "arguments"

_ROLES = {
    "params": PARAMETERS, "parameters": PARAMETERS, "weights": PARAMETERS, "model": PARAMETERS,
    "opt_state": OPTIMIZER_STATE, "optimizer": OPTIMIZER_STATE, "optimizer_state": OPTIMIZER_STATE,
    "batch": BATCH_CATEGORY, "data": BATCH_CATEGORY, "inputs": BATCH_CATEGORY,
}  # fmt: skip
"""The labels of `Step.labels` that are a category; any other label is a category of its own."""


def category_of_label(label: str) -> str:
    """The category of an argument that the step labels so."""
    return _ROLES.get(label, label)


def origin_bits(category: str) -> int:
    """What a value that is made of such an argument is made of, as `structure.py` counts it."""
    return {PARAMETERS: PARAMETER, OPTIMIZER_STATE: STATE}.get(category, BATCH)


def infer_categories(module: Module) -> dict[int, str]:
    """Category of each entry parameter by what the program does with it, for a program without its step.

    What only the update reads is optimizer state; what forward or backward read and the update changes (a result takes
    its place, or the update reads it and has a result of its type) are parameters; what they read and nobody changes is the batch. A program without
    forward and backward just has arguments.
    """
    structure = structure_of(module, {})
    flow = Flow(module)
    donated = {number for _, number, _ in module.input_output_alias}
    results = {str(leaf) for _, leaf in module.entry.root.shape.leaves()}
    found = {}
    differentiated = {FORWARD, BACKWARD, RECOMPUTE} & set(structure.phases.values())
    for parameter in module.entry.parameters:
        number = parameter.parameter_number
        if not differentiated:
            found[number] = ARGUMENTS
            continue
        readers = flow.uses(parameter).readers
        phases = {structure.phases.get(reader, "") for reader in readers}
        if not phases & differentiated:
            found[number] = OPTIMIZER_STATE if UPDATE in phases or number in donated else ARGUMENTS
        else:
            updated = number in donated or (UPDATE in phases and str(parameter.shape) in results)
            found[number] = PARAMETERS if updated else BATCH_CATEGORY
    return found


def module_paths(names: Mapping[int, str], categories: Mapping[int, str]) -> dict[int, str]:
    """The module path of each argument from its name: the leaf of a parameter belongs to the module around it.

    Optimizers keep trees of the parameters' shape: a leaf whose keys end as a parameter's do belongs to that module.
    """
    keys = {number: argument_keys(name) for number, name in names.items()}
    parameters = [number for number in names if categories.get(number) == PARAMETERS]
    prefix = _common_prefix([keys[number] for number in parameters])
    inner = {number: keys[number][prefix:] for number in parameters}
    known = {path: _module_of(path) for path in inner.values()}
    found = {}
    for number, path in keys.items():
        if number in inner:
            found[number] = known[inner[number]]
            continue
        tail = next((path[start:] for start in range(len(path)) if path[start:] in known), None)
        found[number] = known[tail] if tail is not None else path_of_keys(path)
    return found


def argument_blocks(paths: Mapping[int, str]) -> dict[int, str]:
    """The repeated block that each argument's module is in: the first name that occurs with several numbers."""
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    splits = {}
    for number, path in paths.items():
        parts = path.split("/")
        for position, part in enumerate(parts):
            if split := split_number(part):
                key = ("/".join(parts[:position]), split[0])
                members[key].add(split[1])
                splits[number] = (part, key)
                break
    return {number: part if len(members[key]) > 1 else "" for number, (part, key) in splits.items()}


def _module_of(keys: tuple[str, ...]) -> str:
    return path_of_keys(keys[:-1]) or path_of_keys(keys)


def _common_prefix(paths: list[tuple[str, ...]]) -> int:
    """How many keys all paths begin with; at least one key of each stays."""
    if not paths:
        return 0
    length = min(len(path) for path in paths) - 1
    first = paths[0]
    for position in range(length):
        if Counter(path[position] for path in paths)[first[position]] != len(paths):
            return position
    return max(length, 0)

"""The arguments of a program: what each holds, and which module owns it."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from remat_kit._hlo.blocks import Stack
from remat_kit._hlo.flow import Flow
from remat_kit._hlo.module import Instruction, Module
from remat_kit._hlo.scope import argument_keys, path_of_keys, split_number
from remat_kit._hlo.structure import BATCH, DIFFERENTIATED, PARAMETER, STATE, phases_of, running
from remat_kit._phase import BACKWARD, UPDATE

PARAMETERS, OPTIMIZER_STATE, BATCH_CATEGORY, ARGUMENTS = "parameters", "optimizer state", "batch", "arguments"

ROLES = frozenset({PARAMETERS, OPTIMIZER_STATE, BATCH_CATEGORY})

_LABELS = {
    "params": PARAMETERS, "parameters": PARAMETERS, "weights": PARAMETERS, "model": PARAMETERS,
    "opt_state": OPTIMIZER_STATE, "optimizer": OPTIMIZER_STATE, "optimizer_state": OPTIMIZER_STATE,
    "batch": BATCH_CATEGORY, "data": BATCH_CATEGORY, "inputs": BATCH_CATEGORY,
}  # fmt: skip
"""The labels of `Step.labels` that are a category; any other label is a category of its own."""

_NUMBER = re.compile(r"(^|_)\d+$")
_COPYING = frozenset({"copy", "convert", "bitcast", "transpose", "reshape", "dynamic-slice", "slice", "fusion"})
_COPIES, _READERS = 4, 64
"""Copies of copies that are looked through, and how many of an argument's readers."""


def category_of_label(label: str) -> str:
    """The category of an argument that the step labels so."""
    return _LABELS.get(label, label)


def origin_bits(category: str) -> int:
    """What a value that is made of such an argument is made of, as `structure.py` counts it."""
    return {PARAMETERS: PARAMETER, OPTIMIZER_STATE: STATE}.get(category, BATCH)


def infer_categories(module: Module, flow: Flow) -> dict[int, str]:
    """Category of each entry parameter by what the program does with it, for a program without its step.

    What only the update reads is optimizer state. What forward or backward read and the update changes are parameters:
    a result takes its place, or the update reads it and has a result of its type. What they read and nobody changes is
    the batch. Where a step only returns gradients, what they read and has a gradient of its type are parameters. A
    program without forward and backward just has arguments.
    """
    phases = phases_of(module, running(module))
    donated = {number for _, number, _ in module.input_output_alias}
    results = {str(leaf) for _, leaf in module.entry.root.shape.leaves()}
    found = {}
    differentiated = bool(DIFFERENTIATED & set(phases.values()))
    for parameter in module.entry.parameters:
        number = parameter.parameter_number
        if not differentiated:
            found[number] = ARGUMENTS
            continue
        own = _phases_that_read(parameter, flow, phases)
        if not own & DIFFERENTIATED:
            found[number] = OPTIMIZER_STATE if UPDATE in own or number in donated else ARGUMENTS
        else:
            updated = number in donated or (UPDATE in own and str(parameter.shape) in results)
            found[number] = PARAMETERS if updated else BATCH_CATEGORY
    if PARAMETERS not in found.values():
        gradients = _gradients_among_results(module, phases)
        for parameter in module.entry.parameters:
            if found[parameter.parameter_number] == BATCH_CATEGORY and str(parameter.shape) in gradients:
                found[parameter.parameter_number] = PARAMETERS
    return found


def _phases_that_read(parameter: Instruction, flow: Flow, phases: Mapping[int, str]) -> set[str]:
    """The phases that read an argument, be it a copy or a slice of it, which a step may take before forward."""
    found: set[str] = set()
    waiting: list[tuple[Instruction, int]] = [(parameter, 0)]
    seen = {parameter.id}
    while waiting and len(seen) < _READERS:
        at, depth = waiting.pop()
        for reader in flow.uses(at).readers.values():
            phase = phases.get(reader.id, "")
            found.add(phase)
            if phase in DIFFERENTIATED or depth == _COPIES or reader.id in seen:
                continue
            large = [operand for operand in reader.operands[:8] if operand.shape.num_elements > 1]
            if reader.opcode in _COPYING and len(large) <= 1 and len(reader.operands) <= 8:
                seen.add(reader.id)
                waiting.append((reader, depth + 1))
    return found


def _gradients_among_results(module: Module, phases: Mapping[int, str]) -> set[str]:
    """Types of the results that backward makes."""
    found = set()
    for element in module.entry.root.operands if module.entry.root.opcode == "tuple" else (module.entry.root,):
        if phases.get(element.id) == BACKWARD:
            found |= {str(leaf) for _, leaf in element.shape.leaves()}
    return found


def module_paths(names: Mapping[int, str], categories: Mapping[int, str], ranks: Mapping[int, int]) -> dict[int, str]:
    """The module path of each argument from its name: the leaf of a parameter belongs to the module around it.

    Optimizers keep trees of the parameters' shape: a leaf whose keys end as a parameter's do belongs to that module,
    and so does one that only lies beside them, like the statistics of a norm. `ranks` tells a list of layers' matrices
    from a pair of weight and bias.
    """
    keys = {number: argument_keys(name) for number, name in names.items()}
    trees: dict[str, list[int]] = defaultdict(list)  # of parameters, by the name of the step's argument
    for number, path in keys.items():
        if categories.get(number) == PARAMETERS and path:
            trees[path[0]].append(number)
    lists: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for number, path in keys.items():
        if path and path[-1].isdecimal():
            lists[path[:-1]].add(ranks.get(number, 0))
    found: dict[int, str] = {}
    known: dict[tuple[str, ...], str] = {}
    for members in trees.values():
        prefix = _common_prefix([keys[number] for number in members])
        start = prefix
        while start and any(keys[number][start].isdecimal() for number in members):
            start -= 1  # a list of layers is called by the name of the list
        for number in members:
            is_layer = len(lists[keys[number][:-1]]) == 1
            path = found[number] = _module_of(keys[number][start:], is_layer)
            known.setdefault(keys[number][prefix:], path)
            known.setdefault(keys[number][prefix:-1], path)
    known.pop((), None)
    for number, path in keys.items():
        if number in found:
            continue
        tails = [path[start:] for start in range(len(path))] if categories.get(number) != BATCH_CATEGORY else []
        own = next((known[tail] for tail in tails if tail in known), None)
        own = own or next((known[tail[:-1]] for tail in tails if tail[:-1] in known), None)
        found[number] = own if own is not None else path_of_keys(path)
    return found


def argument_blocks(paths: Mapping[int, str], stacks: Mapping[Stack, frozenset[int]]) -> dict[int, str]:
    """The repeated block that each argument's module is in.

    That is the first name in it that occurs with several numbers and is that of an unrolled block of the program.
    Where no name is, the arguments are called otherwise: then one that occurs with the same numbers.
    """
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    splits: dict[int, list[tuple[str, tuple[str, str]]]] = defaultdict(list)
    for number, path in paths.items():
        parts = path.split("/")
        for position, part in enumerate(parts):
            if split := split_number(part):
                key = ("/".join(parts[:position]), split[0])
                members[key].add(split[1])
                splits[number].append((part, key))
    names = {name for _, name in stacks}
    numbers = set(stacks.values())
    several = {key: frozenset(own) for key, own in members.items() if len(own) > 1}
    blocks = {key for key in several if key[1] in names}
    blocks = blocks or {key for key, own in several.items() if own in numbers}
    return {number: next((part for part, key in splits[number] if key in blocks), "") for number in paths}


def _module_of(keys: tuple[str, ...], is_layer: bool) -> str:
    """What is around a leaf. A number as the leaf's key may be a layer of a list, unless one before it is."""
    inside = keys[:-1]
    if is_layer and not any(_NUMBER.search(key) for key in inside):
        inside = keys
    return path_of_keys(inside) or path_of_keys(keys)


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

"""A plan as plain JAX code, which does the same without this project; and as the settings of MaxText."""

import inspect
import pprint
import re
from types import ModuleType

from remat_kit import names
from remat_kit._plan import block, flat, layout, unroll
from remat_kit._plan.plan import Plan

_OWN = re.compile(r"^from remat_kit\.[\w.]+ import (\([^)]*\)|[^\n]*)\n", re.MULTILINE)
_IMPORT = re.compile(r"^(?:import|from) [^\n]*\n", re.MULTILINE)
_DOCSTRING = re.compile(r'\A"""(.*?)"""\n', re.DOTALL)

_HEAD = '''"""A rematerialization plan{of}, made with remat-kit for {target} and JAX {jax}.

Needs JAX alone. `planned(loss)` is the loss with the plan in its blocks: differentiate it in the place of `loss`.

{decisions}
"""

'''

_TAIL = '''

BLOCKS = {blocks}
"""Of each kind of block: its sites (scans around it, stretch of operations), how often scans run each, its fingerprint,
that of its derivative, and what is kept in it (the number of an operation in the derivative, and of its result)."""
COMPILER_OPTIONS = {options}
"""What the step has to be jitted with."""
UNROLLED = {unrolled}
"""The loops that are written out, by the number of their operation; sites are those in what comes of it."""


def planned(loss):
    """`loss` with the plan in its blocks. Raises ValueError when they are not those that the plan was made for."""
    sites = {{Site(*site): number for number, each in enumerate(BLOCKS) for site in each["sites"]}}

    def run(*args, **kwargs):
        blocks = {{}}

        def call(instance, values):
            number = sites[instance.site]
            each = BLOCKS[number]
            if (instance.kind, instance.repeats) != (each["kind"], each["repeats"]):
                raise ValueError(f"the block at {{instance.site}} is not the one that this plan was made for")
            if number not in blocks:
                if each["checkpointed"]:
                    blocks[number] = Block(instance.flat, each["kept"], each["derivative"])
                else:
                    blocks[number] = BareBlock(instance.flat)
            return blocks[number](*values)

        jaxpr, arrays, rebuild = as_program(loss, args, kwargs)
        program = unrolled(jaxpr, UNROLLED) if UNROLLED else jaxpr
        return rebuild(lay_out(program, sorted(sites)).run(arrays, call))

    return run
'''


def to_python(plan: Plan) -> str:
    """The text of a module with a function `planned(loss)` that gives what `plan.apply(loss)` gives."""
    own = [_without_own_imports(module) for module in (flat, block, layout, unroll)]
    imports = sorted({line for text in own for line in _IMPORT.findall(_top(text))}, key=_place_of_import)
    bodies = [text[len(_top(text)) :].strip("\n") for text in own]
    blocks = [
        {
            "sites": [(site.scans, site.stretch) for site in each.sites],
            "repeats": each.repeats,
            "kind": each.kind,
            "derivative": each.derivative,
            "checkpointed": each.checkpointed,
            "kept": {kept.place: kept.how for kept in each.kept},
        }
        for each in plan.blocks
    ]
    head = _HEAD.format(
        of=f" of {plan.workload}" if plan.workload else "",
        target=plan.target,
        jax=plan.versions.get("jax", "?"),
        decisions=_decisions(plan),
    )
    tail = _TAIL.format(
        blocks=pprint.pformat(blocks, width=110, sort_dicts=False),
        options=dict(plan.compiler_options),
        unrolled=plan.unrolled,
    )
    return head + "".join(imports) + "\n" + "\n\n\n".join(bodies) + "\n" + tail


def to_maxtext(plan: Plan) -> str | None:
    """The lines of MaxText's custom policy, where all that the plan keeps are tensors that MaxText names; else None.

    None as well where a block is not checkpointed, which a custom policy cannot say.
    """
    if not all(each.checkpointed for each in plan.blocks):
        return None
    known = {each.name for each in names.VOCABULARY}
    decided: dict[str, str] = {}
    for each in plan.blocks:
        for kept in each.kept:
            if kept.name not in known:
                return None
            place = "device" if kept.how == block.SAVE else "offload"
            if decided.setdefault(kept.name, place) != place:
                return None
    if not plan.blocks or any(
        {kept.name for kept in each.kept} != set(decided) for each in plan.blocks
    ):  # MaxText has one policy for all layers
        return None
    loops = ["scan_layers: false"] if plan.unrolled else []
    return "\n".join([*loops, "remat_policy: custom", *(f"{name}: {place}" for name, place in sorted(decided.items()))])


def _without_own_imports(module: ModuleType) -> str:
    return _OWN.sub("", _DOCSTRING.sub("", inspect.getsource(module)))


def _top(text: str) -> str:
    """The imports at the beginning of a module."""
    end = 0
    for match in re.finditer(r"(?:import|from) [^\n]*\n|\n", text):
        if match.start() != end:
            break
        end = match.end()
    return text[:end]


def _place_of_import(line: str) -> tuple[bool, bool, str]:
    return ("jax" in line, line.startswith("from"), line)


def _decisions(plan: Plan) -> str:
    told = "Give jax.jit(step, compiler_options=COMPILER_OPTIONS): it is XLA's own pass that saves the memory."
    lines = [told, ""] if plan.compiler_options else []
    for each in plan.blocks:
        lines.append(f"{each.module}, {len(each.sites) * each.repeats} of them:")
        lines += [f"  {kept.how} {kept.name} {kept.shape} of {kept.module or 'the block'}" for kept in each.kept]
        nothing = "keep nothing, compute all again" if each.checkpointed else "are not checkpointed"
        lines += [f"  {nothing}"] * (not each.kept)
    return "\n".join(lines)

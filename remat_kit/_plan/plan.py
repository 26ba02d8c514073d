"""`Plan`: what blocks keep, bound to the blocks that it was made for; how it is applied, written and read."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from remat_kit._errors import PlanError
from remat_kit._plan.block import OFFLOAD, SAVE, BareBlock, Block
from remat_kit._plan.flat import Flat, Place, with_constants_as_inputs
from remat_kit._plan.layout import ChangesArgument, Instance, Layout, NoSuchSite, Site, as_program, lay_out
from remat_kit._plan.outline import fingerprint_as, lift_numbers, outline_of
from remat_kit._plan.sizes import outside_flops
from remat_kit._plan.unroll import unrolled
from remat_kit._trace import Differentiated, losses_rewritten, losses_stopped
from remat_kit._units import format_flops

VERSION = 1
NOT_KEPT = "cannot be kept: "
"""Before the names of operations in the name of an `Again` that no plan can change."""
_FORMAT = "remat-kit plan"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kept:
    """One value that a block keeps for its backward.

    Attributes:
      op, output: the operation of the block's derivative that makes it, and which of its results it is.
      how: "save" on the device, or "offload" to pinned host memory.
      name: the model's own tag, else the operation's primitive.
      module: path of the module inside the block; "" when the program does not say.
      shape: e.g. `bf16[8,1024,768]`.
      bytes: of all blocks with these decisions and all runs of their scans together.
      again_s: seconds that keeping it saves, by the model: what computing it again from what else is kept would take,
        less what keeping it takes; 0 where that is less than nothing, and for inputs of the block, which cannot be
        computed again. Of all blocks with these decisions, each time the loss is differentiated: a step that
        accumulates gradients does so once for each microbatch.
    """

    op: int
    output: int
    how: str
    name: str
    module: str
    shape: str
    bytes: int
    again_s: float

    @property
    def place(self) -> Place:
        """The place of the value in the derivative."""
        return self.op, self.output


@dataclass(frozen=True)
class Again:
    """Operations that backward runs again: a matrix product or another costly kernel, or "elementwise" for the rest.

    Attributes:
      name: the primitive; `NOT_KEPT` and primitives for loops and branches and what is computed from their results,
        which runs again whatever is decided.
      module: path of the module inside the block; shape: of the result.
      flops: of matrix products, counted; seconds: by the model, 0 for what cannot be kept, since that is the same for
        every plan. Both of all blocks with these decisions, each time the loss is differentiated: a step that
        accumulates gradients does so once for each microbatch.
    """

    name: str
    module: str
    shape: str
    flops: int
    seconds: float


@dataclass(frozen=True)
class BlockPlan:
    """What some equal blocks keep.

    Attributes:
      kind: fingerprint of what the block computes; derivative: of its derivative, whose operations `kept` counts.
      sites: where the blocks are in the function that is differentiated.
      module: path of the first one's module.
      repeats: how often a scan runs each.
      kept, again: what is kept, and what costs most of what is not.
      outline: the block's operations as text, to say what has changed when it is another.
      checkpointed: whether it is checkpointed at all; else autodiff keeps what it keeps.
    """

    kind: str
    derivative: str
    sites: tuple[Site, ...]
    module: str
    repeats: int
    kept: tuple[Kept, ...]
    again: tuple[Again, ...]
    outline: tuple[str, ...]
    checkpointed: bool = True


@dataclass(frozen=True)
class Tried:
    """A candidate that was compiled for the answer.

    Attributes:
      name: of a policy, or what the decisions were made for; `make.REUSED` follows that of an answer that was compiled
        for another budget and not looked at for this one.
      need_bytes, step_s: compiled need and predicted time; None when the compiler refused.
      predicted_need_bytes: what the model had said before; None where there was no model yet.
      recompute_flops: of the matrix products that run again.
      fits: whether it is within the budget.
      error: why it was refused; "" otherwise.
    """

    name: str
    need_bytes: int | None
    step_s: float | None
    predicted_need_bytes: int | None
    recompute_flops: int | None
    fits: bool
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """What to keep so that a step fits a budget and takes the least time, as the compiler confirmed it.

    Attributes:
      workload, options: of the step, "" and {} for one that was given as a function.
      target, mesh, versions: what it was compiled for and with.
      budget_bytes: None without a budget.
      fits: whether the need is within the budget; of one that does not fit, the plan is that of the smallest need.
      need_bytes, host_bytes: compiled, on the device and in host memory.
      step_s, breakdown_s: predicted from the compiled program.
      recompute_flops: of the matrix products that run again in the whole step, counted on what was compiled.
      blocks: the decisions.
      outside_flops: of the matrix products of the function that is differentiated that are in no block; None when not
        counted.
      tried: all that was compiled, in that order; best_policy: the fastest named policy that fits, None when none does.
      reasons: sentences: what bounds the need, what the plan gains and by what.
      compiler_options: what `jax.jit(step, compiler_options=...)` has to be given with it, mostly nothing: XLA's own
        pass, where nothing else is as fast, is told its limit there.
      unrolled: loops over blocks that are written out, each by the number of its operation in the function that is
        differentiated; sites are those in the program that comes of it.
    """

    workload: str
    options: Mapping[str, Any]
    target: str
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    budget_bytes: int | None
    fits: bool
    need_bytes: int
    host_bytes: int
    step_s: float
    breakdown_s: Mapping[str, float]
    recompute_flops: int
    blocks: tuple[BlockPlan, ...]
    tried: tuple[Tried, ...] = ()
    best_policy: Tried | None = None
    reasons: tuple[str, ...] = ()
    outside_flops: int | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    unrolled: tuple[int, ...] = ()
    version: int = field(default=VERSION)

    def __hash__(self) -> int:
        return hash(self.dumps())

    @property
    def name(self) -> str:
        """What tables call it."""
        budget = "" if self.budget_bytes is None else f" under {self.budget_bytes} bytes"
        return f"plan{budget}"

    @property
    def margin_bytes(self) -> int | None:
        """What is left of the budget; negative when it does not fit; None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.need_bytes

    def apply(self, function: _Function) -> _Function:
        """`function` with this plan: a training step, or the loss that one differentiates, on the same shapes.

        Parameters, results and gradients stay what they are. When it is traced, PlanError is raised if its blocks are
        not those that the plan was made for, with what has changed.
        """

        is_step = [False]

        @functools.wraps(function)
        def planned(*args: Any, **kwargs: Any) -> Any:
            applied = _Applied(self)
            if not is_step[0]:
                with contextlib.suppress(Differentiated):
                    return applied.run_loss(function, args, kwargs)
            is_step[0] = True
            with losses_rewritten(applied.run, planned):
                result = function(*args, **kwargs)
            applied.check()
            return result

        return planned  # pyright: ignore[reportReturnType]

    def checkpoint(self, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        """What `jax.checkpoint` is to a policy: a function that is one block of the plan's, checkpointed."""

        @functools.wraps(function)
        def planned(*args: Any) -> Any:
            leaves, structure = jax.tree.flatten(args)
            shape: list[Any] = []

            def flat(*leaves: Any) -> list[Any]:
                found, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
                shape[:] = [tree]
                return found

            jaxpr, consts = with_constants_as_inputs(jax.make_jaxpr(flat)(*leaves))
            block, numbers = self.block(Flat(jaxpr))
            return jax.tree.unflatten(shape[0], block(*consts, *leaves, *numbers))

        return planned

    def block(self, flat: Flat) -> tuple[Block | BareBlock, list[Any]]:
        """The block that computes what `flat` does, under this plan, and numbers that it takes behind its arguments.

        Raises PlanError when the plan has none of that kind, or decides on it in more than one way.
        """
        for each in self.blocks:
            numbers = lift_numbers(flat, each.outline)
            if each.kind == fingerprint_as(flat, each.outline):
                same = each.kind, each.derivative
                if self.unrolled or sum((other.kind, other.derivative) == same for other in self.blocks) > 1:
                    raise PlanError(
                        f"block {each.module!r} alone does not say which layer it is, and the plan "
                        f"{'writes their loop out' if self.unrolled else 'keeps other values in some of them'}. Give "
                        "plan.apply the step or the loss instead, without the plan in the model."
                    )
                return _block(each, flat), numbers
        if not self.blocks:
            raise PlanError("the plan has no blocks. Make a new plan.")
        nearest = min(self.blocks, key=lambda each: abs(len(each.outline) - len(flat.ops)))
        raise PlanError(self.changed(nearest, flat))

    def changed(self, block: BlockPlan, flat: Flat) -> str:
        """What is different in a block that is not the one of the plan."""
        now = outline_of(flat)
        where = next((n for n, pair in enumerate(zip(block.outline, now, strict=False)) if pair[0] != pair[1]), None)
        if where is not None:
            what = f"operation {where} of block {block.module!r} was {block.outline[where]!r} and is {now[where]!r}"
        elif len(now) != len(block.outline):
            what = f"block {block.module!r} had {len(block.outline)} operations and has {len(now)}"
        else:
            what = f"the operations of block {block.module!r} are wired differently"
        return f"the plan is for another model: {what}. {self.made_with()} Make a new plan."

    def made_with(self) -> str:
        made = self.versions.get("jax", "")
        other = f" It was made with jax {made}, and this is {jax.__version__}." if made != jax.__version__ else ""
        return f"A plan holds for the shapes, types and operations that it was made for.{other}"

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object; the same plan is the same text."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def dumps(self) -> str:
        """The text of a plan file."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def loads(text: str, source: str = "the plan") -> "Plan":
        """The plan of a plan file's text. Raises PlanError when it is none, damaged, or of a newer version."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(
                f"{source} is not JSON: {error}. Give a file that `remat-kit plan --json` wrote."
            ) from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanError(f"{source} is not a plan. Give a file that `remat-kit plan --json` wrote.")
        version = data.get("version")
        if version != VERSION:
            raise PlanError(
                f"{source} is of plan version {version!r}, this remat-kit reads version {VERSION}. "
                "Read it with the remat-kit that wrote it, or make a new plan."
            )
        try:
            return _from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{source} is damaged: {type(error).__name__}: {error}. Make a new plan.") from error


class _Applied:
    """A plan while a function is traced with it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sites = {site: number for number, block in enumerate(plan.blocks) for site in block.sites}
        self.blocks: dict[int, Block | BareBlock] = {}

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a function that is differentiated."""
        try:
            program = unrolled(jaxpr, self.plan.unrolled) if self.plan.unrolled else jaxpr
            layout = lay_out(program, sorted(self.sites))
        except NoSuchSite as error:
            raise PlanError(
                f"the plan is for another model: {error}. {self.plan.made_with()} Make a new plan."
            ) from error
        self._check(layout)
        return layout.run(arguments, self._call)

    def run_loss(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The results of a function that differentiates nothing itself: a loss. Raises Differentiated for others."""
        with losses_stopped():
            try:
                jaxpr, arrays, rebuild = as_program(function, args, kwargs)
            except ChangesArgument as error:
                raise PlanError(f"cannot apply a plan to {getattr(function, '__name__', 'this')}: {error}") from error
        results = self.run(jaxpr, arrays)
        self.check()
        return rebuild(results)

    def _check(self, layout: Layout) -> None:
        """Raises PlanError when blocks are not the plan's, or when there is more or less of the model beside them."""
        for instance in layout.instances():
            block = self.plan.blocks[self.sites[instance.site]]
            if instance.kind != block.kind:
                raise PlanError(self.plan.changed(block, instance.flat))
            if instance.repeats != block.repeats:
                raise PlanError(
                    f"the plan is for another model: its loop ran block {block.module!r} {block.repeats} times and "
                    f"runs it {instance.repeats} times. {self.plan.made_with()} Make a new plan."
                )
        outside = outside_flops(layout)
        if self.plan.outside_flops not in (None, outside):
            raise PlanError(
                "the plan is for another model: the matrix products outside of its blocks had "
                f"{format_flops(self.plan.outside_flops)} and have {format_flops(outside)}: there are more or fewer "
                f"layers, or another head. {self.plan.made_with()} Make a new plan."
            )

    def _call(self, instance: Instance, values: Sequence[Any]) -> Sequence[Any]:
        number = self.sites[instance.site]
        block = self.plan.blocks[number]
        if number not in self.blocks:
            self.blocks[number] = _block(block, instance.flat)
        return self.blocks[number](*values)

    def check(self) -> None:
        """Raises PlanError when a block was differentiated, and its derivative was never the one of the plan."""
        for number, block in self.blocks.items():
            if isinstance(block, Block) and block.seen and not block.matched:
                raise PlanError(
                    f"block {self.plan.blocks[number].module!r} is the plan's, but not its derivative: other inputs "
                    f"are differentiated, or JAX derives it in another way. {self.plan.made_with()} Make a new plan."
                )


def _block(block: BlockPlan, flat: Flat) -> Block | BareBlock:
    if not block.checkpointed:
        return BareBlock(flat)
    return Block(flat, {each.place: each.how for each in block.kept}, block.derivative)


def _from_json(data: Mapping[str, Any]) -> Plan:
    fields = {each.name for each in dataclasses.fields(Plan)}
    unknown = set(data) - fields - {"format"}
    if unknown:
        raise ValueError(f"unknown entries {', '.join(sorted(unknown))}")
    if missing := fields - set(data):
        raise ValueError(f"no entries {', '.join(sorted(missing))}")
    given = {name: value for name, value in data.items() if name in fields}
    tried = tuple(Tried(**each) for each in data["tried"])
    best = data["best_policy"]
    blocks = tuple(_block_from_json(each) for each in data["blocks"])
    plan = Plan(**{**given, "blocks": blocks, "tried": tried, "best_policy": Tried(**best) if best else None,
                   "reasons": tuple(data["reasons"]), "unrolled": tuple(data["unrolled"])})  # fmt: skip
    if not all(each.how in (SAVE, OFFLOAD) for block in blocks for each in block.kept):
        raise ValueError("a value is neither saved nor offloaded")
    return plan


def _block_from_json(data: Mapping[str, Any]) -> BlockPlan:
    sites = tuple(
        Site(tuple(each["scans"]), tuple(each["stretch"]) if each["stretch"] is not None else None)
        for each in data["sites"]
    )
    kept = tuple(Kept(**each) for each in data["kept"])
    again = tuple(Again(**each) for each in data["again"])
    return BlockPlan(**{**data, "sites": sites, "kept": kept, "again": again, "outline": tuple(data["outline"])})

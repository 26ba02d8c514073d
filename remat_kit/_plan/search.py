"""`Planner`: decisions under a budget, each candidate compiled, the model corrected by what the compiler says."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from remat_kit._compile import CompileOptions, compile_step
from remat_kit._errors import CompileError
from remat_kit._plan.block import OFFLOAD, SAVE, BareBlock, Block
from remat_kit._plan.choose import Choice, choose
from remat_kit._plan.graph import Graph
from remat_kit._plan.layout import Instance, Site
from remat_kit._plan.measured import Compiled, NeedModel, Needs, read_compiled
from remat_kit._plan.named import NamedBlock, applicable, solution_of
from remat_kit._plan.own_pass import options_under
from remat_kit._plan.solve import Solution, evaluate, frontier
from remat_kit._plan.survey import Survey, survey, trace_with
from remat_kit._plan.unroll import MOST_OPERATIONS
from remat_kit._policy import POLICIES, Policy
from remat_kit._step import Step
from remat_kit._target import Target
from remat_kit._units import format_bytes, format_seconds

MOST_COMPILES = 5
XLA_AUTO = "xla_auto"
UNROLLED = ", loops written out"
"""At the end of the name of a candidate whose loops over blocks are unrolled."""
FACTORS = (1.0, 2.0, 4.0)
"""On what the model says that keeping a value costs: a second opinion, since how XLA fuses a write is not known."""

_ROUNDS = 5
"""Of refining the limit that the solver is given: the prediction is not linear in what is kept, but nearly so."""
_CLOSE = 0.002
"""Of a budget: decisions that are predicted to leave no more room than that are not refined."""
_FIGURES = ("kept_bytes", "backward_bytes", "seconds")
_ALIKE = 1e-3
"""Decisions whose figures differ by less than that share are alike: another compile would tell nothing new."""


@dataclass(frozen=True)
class Candidate:
    """Decisions that were compiled, or a named policy.

    Attributes:
      name: what it is called in the answer.
      choice: the decisions; of a named policy, those that it comes to in the model.
      compiled: what the compiler says; None when it refused.
      predicted_need_bytes: what the model said before; None for the first.
      error: why it could not be compiled.
      is_policy: it is a named policy, as `jax.checkpoint` runs it.
      options: compiler options that it needs beside its decisions, as (name, value) pairs.
      is_unrolled: loops over blocks are written out, and `choice` is of each block in them.
    """

    name: str
    choice: Choice
    compiled: Compiled | None
    predicted_need_bytes: int | None
    error: str | None = None
    is_policy: bool = False
    options: tuple[tuple[str, str], ...] = ()
    is_unrolled: bool = False

    @property
    def seconds(self) -> float:
        """The predicted time of a step; infinite when the compiler refused."""
        return self.compiled.seconds if self.compiled else float("inf")

    @property
    def need_bytes(self) -> float:
        """The compiled need; infinite when the compiler refused."""
        return self.compiled.need_bytes if self.compiled else float("inf")

    def fits(self, budget: float) -> bool:
        """Whether it needs no more than the budget."""
        return self.compiled is not None and self.compiled.need_bytes <= budget


@dataclass
class Planner:
    """Plans for one step on one target. Compiled programs are kept, so that further budgets cost little.

    Attributes:
      step, target, options: what is planned, for what, compiled how.
      found: its blocks.
      offload: whether values may be moved to the host.
      unroll: whether loops over blocks may be written out (`unrolled`).
      tell: is called with one line on each program that was compiled.
    """

    step: Step
    target: Target
    options: CompileOptions
    found: Survey
    offload: bool = False
    unroll: bool = False
    tell: Callable[[str], None] | None = None
    _compiles: int = 0
    _unrolled: "Planner | None" = None
    _frontiers: dict[float, dict[str, tuple[Solution, ...]]] = field(default_factory=dict)
    _candidates: dict[Any, Candidate] = field(default_factory=dict)

    @staticmethod
    def of(
        step: Step,
        target: Target,
        options: CompileOptions | None = None,
        where: str | None = None,
        offload: bool = False,
        unroll: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> "Planner":
        """A planner for a step. Raises RematKitError when there is nothing to plan."""
        found = survey(step, target, where)
        planner = Planner(step, target, options or CompileOptions(), found, offload, unroll, tell)
        if unroll and found.more_loops:
            longer = survey(step, target, where, unroll=True)
            planner._unrolled = Planner(step, target, planner.options, longer, offload, tell=tell)
        return planner

    @property
    def compiles(self) -> int:
        """How often XLA was asked so far."""
        return self._compiles + (self._unrolled.compiles if self._unrolled else 0)

    @property
    def unrolled(self) -> "Planner | None":
        """The planner for the step with its loops over blocks written out; None when that is not allowed, or none is.

        Each block of theirs is decided on by itself there.
        """
        return self._unrolled

    @property
    def why_not_unrolled(self) -> str:
        """Why there are no loops to write out, as the end of a sentence."""
        if any(len(site.scans) == 1 for site in self.found.sites):
            return f"the step would be more than {MOST_OPERATIONS:,} operations"
        return "there is none with blocks in its body that is in no other loop"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each block, in the order in which they run."""
        by_site = {each.site: kind.name for kind in self.found.kinds.values() for each in kind.instances}
        return tuple(by_site[site] for site in self.found.sites)

    @property
    def repeats(self) -> dict[str, int]:
        """How often a scan runs each kind."""
        return {name: kind.graph.repeats for name, kind in self.found.kinds.items()}

    def frontiers(self, factor: float = 1.0) -> dict[str, tuple[Solution, ...]]:
        """The solutions of each kind that can be chosen from."""
        if factor not in self._frontiers:
            points = 8 if len(self.found.kinds) < 4 else 4
            self._frontiers[factor] = {
                name: frontier(kind.graph, len(kind.instances), points, factor, self.offload)
                for name, kind in self.found.kinds.items()
            }
        return self._frontiers[factor]

    def all_again(self) -> Candidate:
        """Every block computed again as a whole: what every model starts from.

        Where random bits must not be made again, what keeps the least instead.
        """
        solutions = {name: evaluate(kind.graph, ()) for name, kind in self.found.kinds.items()}
        if None not in solutions.values():
            return self.compile("all again", self._choice(solutions))
        return self.compile("least kept", self._choice({name: self.frontiers()[name][0] for name in solutions}))

    def _choice(self, solutions: Mapping[str, Any]) -> Choice:
        repeats = self.repeats
        return Choice(self.kinds, tuple(solutions[kind] for kind in self.kinds), tuple(repeats[k] for k in self.kinds))

    def chosen(self, needs: Needs, budget: float, factor: float = 1.0) -> Choice | None:
        """The decisions that take the least time within `budget`, by what the compiler has said so far."""
        frontiers = self.frontiers(factor)
        if budget == float("inf"):
            return choose(self.kinds, self.repeats, frontiers, None, None)
        model, limit = needs.at(budget), budget
        best: Choice | None = None
        for _ in range(_ROUNDS):  # the limit of the nearest program's model at which all of them come to the budget
            found = choose(self.kinds, self.repeats, frontiers, *model.limits(limit))
            if found is None:
                break
            over = needs.need_bytes(found) - budget
            if over <= 0 and (best is None or found.seconds < best.seconds):
                best = found
            if -_CLOSE * budget < over <= 0:
                break
            limit -= over
        return best

    def least(self, needs: Needs) -> Choice:
        """The decisions that need the fewest bytes by what the compiler has said so far."""
        least = self._choice({name: min(own, key=lambda each: each.bytes) for name, own in self.frontiers().items()})
        low, high = 0.0, float(needs.need_bytes(least))
        best = least
        for _ in range(12):
            middle = (low + high) / 2
            found = self.chosen(needs, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def needs(self) -> Needs:
        """What the compiled plans say of the need of others. Raises ValueError when there is none yet."""
        models = tuple(NeedModel(each.choice, each.compiled) for each in self.plans_so_far() if each.compiled)
        if not models:
            raise ValueError("nothing has been compiled yet")
        return Needs(models)

    def alike(self, choice: Choice, budget: float) -> Candidate | None:
        """What was compiled of these decisions, or of some within the budget that keep as much and take as long."""
        for each in self._candidates.values():
            pairs = [(getattr(each.choice, name), getattr(choice, name)) for name in _FIGURES]
            near = all(abs(one - other) <= _ALIKE * max(one, other) for one, other in pairs)
            if not each.is_policy and (each.choice == choice or (near and each.fits(budget))):
                return each
        return None

    def compile(self, name: str, choice: Choice, predicted: int | None = None) -> Candidate:
        """What the compiler says of decisions; each are compiled once."""
        key = choice.kinds, tuple((each.kept, each.offloaded, each.is_bare) for each in choice.solutions)
        if key not in self._candidates:
            blocks = self.blocks_of(choice)
            is_unrolled = bool(self.found.loops)
            name = f"{name}{UNROLLED}" if is_unrolled else name
            compiled, error = self._compile(name, lambda instance: blocks[instance.site])
            self._candidates[key] = Candidate(name, choice, compiled, predicted, error, is_unrolled=is_unrolled)
        return self._candidates[key]

    def named(self, policy: Policy) -> Candidate:
        """A named policy on the blocks; compiled once. Policy `full` is every block computed again."""
        if policy == POLICIES["full"] and policy not in self._candidates:
            again = self.all_again()
            self._candidates[policy] = dataclasses.replace(again, name=policy.name, is_policy=True)
        if policy not in self._candidates:
            solutions = {name: solution_of(policy, kind.graph) for name, kind in self.found.kinds.items()}
            blocks = {name: NamedBlock(kind.block.flat, policy) for name, kind in self.found.kinds.items()}
            by_site = dict(zip(self.found.sites, self.kinds, strict=True))
            compiled, error = self._compile(policy.name, lambda instance: blocks[by_site[instance.site]])
            self._candidates[policy] = Candidate(policy.name, self._choice(solutions), compiled, None, error, True)
        return self._candidates[policy]

    def xla_auto(self, budget: float) -> Candidate | None:
        """XLA's own pass under a budget, on the step without checkpoints; None where it cannot be told a budget."""
        fixed = self.needs().models[0].compiled.fixed_bytes
        options = options_under(budget, fixed, self.target, self.options)
        if options is None:
            return None
        key = XLA_AUTO, options
        if key not in self._candidates:
            blocks = {name: BareBlock(kind.block.flat) for name, kind in self.found.kinds.items()}
            by_site = dict(zip(self.found.sites, self.kinds, strict=True))
            compiled, error = self._compile(XLA_AUTO, lambda instance: blocks[by_site[instance.site]], options)
            choice = self.model_of(POLICIES["none"])
            self._candidates[key] = Candidate(
                XLA_AUTO, choice, compiled, None, error, is_policy=True, options=options.xla_options
            )
        return self._candidates[key]

    def named_so_far(self) -> tuple[Candidate, ...]:
        """The named policies that have been compiled."""
        return tuple(each for each in self._candidates.values() if each.is_policy and not each.options)

    def own_pass_so_far(self) -> tuple[Candidate, ...]:
        """XLA's own pass under the budgets for which it has been compiled."""
        return tuple(each for each in self._candidates.values() if each.options)

    def plans_so_far(self) -> tuple[Candidate, ...]:
        """The decisions that have been compiled."""
        return tuple(each for each in self._candidates.values() if each.compiled and not each.is_policy)

    def policies(self) -> tuple[Policy, ...]:
        """The named policies that mean something for this step, without those that make again what must not be."""
        graphs = [kind.graph for kind in self.found.kinds.values()]
        return tuple(each for each in applicable(graphs) if all(solution_of(each, graph) for graph in graphs))

    def model_of(self, policy: Policy) -> Choice:
        """What a named policy comes to in the model."""
        return self._choice({name: solution_of(policy, kind.graph) for name, kind in self.found.kinds.items()})

    def blocks_of(self, choice: Choice) -> dict[Site, Block | BareBlock]:
        """The block for each site under some decisions; equal ones are one object, which JAX traces once."""
        known: dict[Any, Block | BareBlock] = {}
        found: dict[Site, Block | BareBlock] = {}
        for site, kind, solution in zip(self.found.sites, choice.kinds, choice.solutions, strict=True):
            key = kind, solution.kept, solution.offloaded, solution.is_bare
            if key not in known:
                known[key] = block_under(self.found.kinds[kind].graph, self.found.kinds[kind].block, solution)
            found[site] = known[key]
        return found

    def _compile(
        self, name: str, choose_block: Callable[[Instance], Any], options: CompileOptions | None = None
    ) -> tuple[Compiled | None, str | None]:
        self._compiles += 1
        start = time.perf_counter()
        try:
            traced = trace_with(self.step, self.target, self.found.place, choose_block)
            compiled, error = read_compiled(compile_step(traced, options or self.options)), None
            said = f"need {format_bytes(compiled.need_bytes)}, predicted {format_seconds(compiled.seconds)}"
        except CompileError as refused:
            compiled, error, said = None, str(refused), "refused by the compiler"
        if self.tell:
            self.tell(f"compiled {name}: {said} ({format_seconds(time.perf_counter() - start)})")
        return compiled, error


def block_under(graph: Graph, block: Block, solution: Solution) -> Block | BareBlock:
    """A block that keeps what a solution keeps. Inputs of the block are kept without a word."""
    if solution.is_bare:
        return BareBlock(block.flat)
    places = {graph.values[number].place: SAVE for number in solution.kept if not graph.values[number].is_input}
    places |= {graph.values[number].place: OFFLOAD for number in solution.offloaded}
    return Block(block.flat, places, graph.derivative.fingerprint)

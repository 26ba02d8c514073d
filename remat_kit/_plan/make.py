"""`plan`: the fastest decisions for a step under a budget in bytes, confirmed by the compiler."""

import dataclasses

from remat_kit import _fingerprint
from remat_kit._compile import CompileOptions
from remat_kit._errors import PlanError
from remat_kit._plan.budget import parse_budget
from remat_kit._plan.choose import Choice
from remat_kit._plan.describe import block_plans, reasons_for
from remat_kit._plan.plan import Plan, Tried
from remat_kit._plan.search import FACTORS, MOST_COMPILES, Candidate, Planner
from remat_kit._policy import POLICIES
from remat_kit._step import Step, Workload
from remat_kit._target import Target, get_target

REUSED = ", of another budget"
"""At the end of the name of an answer that was compiled for another budget, with no compile of its own."""
_MODEL_ERROR = 0.05
"""Of a need, by which the model may be wrong before the compiler has corrected it."""
_MOST_MARGIN = 0.005
"""Of a budget, left free at most after a program was over it: the packing of buffers is not foreseen to the byte."""


def plan(
    step: Step,
    target: str | Target,
    budget: str | int | None = None,
    *,
    where: str | None = None,
    offload: bool = False,
    unroll: bool = False,
    options: CompileOptions | None = None,
) -> Plan:
    """The plan for a step that takes the least predicted time and needs no more than `budget` on `target`.

    `budget` is text such as "40GiB" or "90%", bytes, or None for the fastest plan of all. `where` is a regular
    expression on module paths that says what a block is; without it blocks are found (`find_sites`). With `offload`,
    values may wait in host memory, where the copies fit beside what is computed. With `unroll`, loops over blocks may
    be written out: nothing is stacked then and each block may keep something else, but the program takes the compiler
    as many times as long. A plan that does not fit is that of the smallest need that was reached (`Plan.fits`). At most
    `MOST_COMPILES` programs are compiled.

    Raises PlanError for a budget that is none and for what is no Step, RematKitError when there is nothing to plan.
    """
    if not isinstance(step, Step):
        raise PlanError(
            f"plan was given a {type(step).__name__}. Give a remat_kit.Step(function, arguments), the whole training "
            "step with what it is called with; auto_remat takes a function."
        )
    chosen = get_target(target) if isinstance(target, str) else target
    limit = parse_budget(budget, chosen)
    return plan_with(Planner.of(step, chosen, options, where, offload, unroll), limit)


def plan_with(planner: Planner, limit: int | None, workload: Workload | None = None) -> Plan:
    """The plan under `limit` bytes of a planner, which keeps what it has compiled for further budgets."""
    search = _Search(planner, limit)
    best = search.run()
    return _answer(planner, limit, best, search, workload)


class _Search:
    """Candidates for one budget, compiled one after the other."""

    def __init__(self, planner: Planner, limit: int | None) -> None:
        self.planner = planner
        self.searched = planner
        """Where further decisions are made: the planner itself, or the one with loops written out."""
        self.loops = ""
        """Why it is not the latter, as a sentence, where that was allowed."""
        self.limit = float("inf") if limit is None else float(limit)
        self.tried: list[Candidate] = []
        self.best_policy: Candidate | None = None
        self.margin = 0.0

    def run(self) -> Candidate:
        """The fastest candidate that fits, else the one of the smallest need."""
        first = self._add(self.planner.all_again())
        if first.compiled is None:
            raise PlanError(f"the compiler refuses the step with as little kept as can be: {first.error}")
        self._policy()
        if not first.fits(self.limit):
            self._reach()
        self._unroll(first)
        self._listen()
        self._nearly()
        self._own_pass()
        if self._is_behind() and self._left() and self.best_policy:
            # The same decisions as a plan of their own, which is what can be applied and written down.
            name = f"as {self.best_policy.name}"
            self._add(self.planner.compile(name, self.best_policy.choice, None))
        return self._answer()

    def _unroll(self, first: Candidate) -> None:
        """Goes on with loops written out, where that is allowed, fits with all computed again, and is then faster."""
        unrolled = self.planner.unrolled
        if not self.planner.unroll:
            return
        if unrolled is None:
            self.loops = f"No loop is written out: {self.planner.why_not_unrolled}."
        elif not first.fits(self.limit) or self._left() < 2:
            self.loops = "Loops were not written out: the budget leaves no room, or no compile was left to try it."
        else:
            again = self._add(unrolled.all_again())
            if again.fits(self.limit) and again.seconds < first.seconds:
                self.searched = unrolled
            else:
                what = "is no faster" if again.fits(self.limit) else "is over the budget"
                self.loops = f"With its loops written out and as little kept as can be, the step {what}."

    def _listen(self) -> None:
        """One opinion after the other on what keeping costs, each until XLA says that it fits.

        Then the best once more, with what was learned of the need. Ends when no opinion asks for anything new.
        """
        settled: dict[float, float] = {}
        while self._left() > self._is_behind():
            waiting = [factor for factor in FACTORS if factor not in settled]
            for factor in [*waiting, *sorted(settled, key=lambda each: settled[each])]:
                choice = self._chosen(factor)
                known = self.searched.alike(choice, self.limit)
                if known is None:
                    break
                settled.setdefault(factor, known.seconds if known.fits(self.limit) else float("inf"))
            else:
                return
            candidate = self._add(
                self.searched.compile(f"plan {factor:g}", choice, self.searched.needs().need_bytes(choice))
            )
            if candidate.fits(self.limit):
                settled[factor] = min(candidate.seconds, settled.get(factor, float("inf")))
            elif candidate.need_bytes < float("inf") and candidate.predicted_need_bytes is not None:
                wrong = candidate.need_bytes - candidate.predicted_need_bytes
                self.margin = min(max(0.0, wrong), _MOST_MARGIN * self.limit)

    def _chosen(self, factor: float) -> Choice:
        """The best decisions of one opinion; where nothing fits, those that need a little more than the least.

        After a program was over the budget, with a margin of as much as its need was underestimated.
        """
        needs = self.searched.needs()
        if found := self.searched.chosen(needs, self.limit - self.margin, factor):
            return found
        least = self.searched.least(needs)
        return self.searched.chosen(needs, needs.need_bytes(least) * (1 + _MODEL_ERROR), factor) or least

    def _nearly(self) -> None:
        """Where no plan fits, the named policies that are over the budget by no more than the model may be wrong."""
        needs = self.planner.needs()
        predicted = {policy: needs.need_bytes(self.planner.model_of(policy)) for policy in self.planner.policies()}
        for policy in sorted(predicted, key=lambda each: predicted[each]):
            near = predicted[policy] <= self.limit * (1 + _MODEL_ERROR)
            if not near or self._left() < 2 or self._best().fits(self.limit):
                return
            candidate = self._add(self.planner.named(policy))
            if candidate.fits(self.limit):
                self.best_policy = candidate
                return

    def _own_pass(self) -> None:
        """XLA's own pass, where a step without checkpoints is over the budget and a compile is left.

        One is left for the decisions of a named policy that is faster so far.
        """
        none = self.planner.model_of(POLICIES["none"])
        if self._left() > self._is_behind() and self.planner.needs().need_bytes(none) > self.limit:
            candidate = self.planner.xla_auto(self.limit)
            if candidate is not None:
                self._add(candidate)

    def _is_behind(self) -> bool:
        """Whether a named policy that fits is faster than all decisions of our own so far."""
        best = self._best()
        policy = self.best_policy
        return policy is not None and (not best.fits(self.limit) or policy.seconds < best.seconds)

    def _left(self) -> int:
        return MOST_COMPILES - len(self.tried)

    def _reach(self) -> None:
        """The smallest need of the model, compiled, where computing all again is too much."""
        needs = self.planner.needs()
        least = self.planner.least(needs)
        self._add(self.planner.compile("smallest need", least, needs.need_bytes(least)))

    def _policy(self) -> None:
        """The fastest named policy that fits: of those that are compiled, and the one that the model ranks first."""
        needs = self.planner.needs()
        ranked = sorted(self.planner.policies(), key=lambda policy: self.planner.model_of(policy).seconds)
        fitting = [each for each in ranked if needs.need_bytes(self.planner.model_of(each)) <= self.limit]
        if POLICIES["full"] in ranked:
            self.planner.named(POLICIES["full"])  # compiled already
        if first := next((each for each in fitting if each.name != "full"), None):
            self._add(self.planner.named(first))
        known = [each for each in self.planner.named_so_far() if each.fits(self.limit)]
        self.best_policy = min(known, key=lambda each: each.seconds, default=None)
        if self.best_policy is not None and self.best_policy.name != "full":
            self._add(self.best_policy)

    def _add(self, candidate: Candidate) -> Candidate:
        if candidate not in self.tried:
            self.tried.append(candidate)
        return candidate

    def _answer(self) -> Candidate:
        best = self._best()
        if best not in self.tried:
            self.tried.append(dataclasses.replace(best, name=f"{best.name}{REUSED}"))
        return best

    def _best(self) -> Candidate:
        """Of decisions of our own, those compiled for other budgets with them, and of XLA's own pass.

        A named policy is a comparison only: its decisions are among those that a plan can make.
        """
        unrolled = self.planner.unrolled
        known = (*self.planner.plans_so_far(), *self.planner.own_pass_so_far())
        known = (*known, *unrolled.plans_so_far()) if unrolled else known
        fitting = [each for each in known if each.fits(self.limit)]
        if fitting:
            return min(fitting, key=lambda each: (each.seconds, each.need_bytes))
        return min(self.planner.plans_so_far(), key=lambda each: (each.need_bytes, each.seconds))


def _answer(planner: Planner, limit: int | None, best: Candidate, search: _Search, workload: Workload | None) -> Plan:
    compiled = best.compiled
    assert compiled is not None
    budget = search.limit
    policy = search.best_policy if search.best_policy and search.best_policy.fits(budget) else None
    made_by = planner.unrolled if best.is_unrolled and planner.unrolled else planner
    return Plan(
        workload=workload.spec if workload else "",
        options=dict(workload.options) if workload else {},
        target=planner.target.name,
        mesh=dict(planner.target.mesh),
        versions=_fingerprint.versions(),
        budget_bytes=limit,
        fits=best.fits(budget),
        need_bytes=compiled.need_bytes,
        host_bytes=compiled.host_bytes,
        step_s=compiled.seconds,
        breakdown_s=dict(compiled.prediction.breakdown),
        recompute_flops=compiled.recompute_flops,
        blocks=block_plans(made_by, best.choice),
        outside_flops=made_by.found.outside_flops,
        tried=tuple(_tried(each, budget) for each in search.tried),
        best_policy=_tried(policy, budget) if policy else None,
        reasons=(*reasons_for(best, policy, search.tried, limit), *filter(None, [search.loops])),
        compiler_options=dict(best.options),
        unrolled=made_by.found.loops,
    )


def _tried(candidate: Candidate, budget: float) -> Tried:
    compiled = candidate.compiled
    return Tried(
        name=candidate.name,
        need_bytes=compiled.need_bytes if compiled else None,
        step_s=compiled.seconds if compiled else None,
        predicted_need_bytes=candidate.predicted_need_bytes,
        recompute_flops=compiled.recompute_flops if compiled else None,
        fits=candidate.fits(budget),
        error=candidate.error or "",
    )

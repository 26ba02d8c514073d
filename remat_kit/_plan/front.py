"""Plans for several budgets: from the smallest need to the least time, and where the trade turns."""

from collections.abc import Sequence

from remat_kit._plan.make import plan_with
from remat_kit._plan.plan import Plan
from remat_kit._plan.search import Planner
from remat_kit._step import Workload


def front(planner: Planner, points: int = 5, workload: Workload | None = None) -> tuple[Plan, ...]:
    """Plans from the fewest bytes to the least time, none of which is beaten in both by another.

    `points` budgets are tried, spread evenly between the two ends.
    """
    fastest = plan_with(planner, None, workload)
    least = plan_with(planner, 1, workload)  # nothing fits, so it is the smallest need that is found
    least = plan_with(planner, least.need_bytes, workload)
    low, high = least.need_bytes, fastest.need_bytes
    budgets = [low + (high - low) * step // (points - 1) for step in range(1, points - 1)] if high > low else []
    found = [least, *(plan_with(planner, budget, workload) for budget in budgets), fastest]
    return tuple(not_beaten(found))


def not_beaten(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other one beats in need and predicted time, fewest bytes first, equal ones once."""
    found: list[Plan] = []
    for each in sorted(plans, key=lambda each: (each.need_bytes, each.step_s)):
        if not found or each.step_s < found[-1].step_s:
            found.append(each)
    return found


def knee(plans: Sequence[Plan]) -> Plan:
    """The plan nearest to having the smallest need and the least time of all, both as shares of their ranges."""
    needs, times = ([getattr(each, name) for each in plans] for name in ("need_bytes", "step_s"))

    def distance(each: Plan) -> float:
        need = (each.need_bytes - min(needs)) / max(1, max(needs) - min(needs))
        time = (each.step_s - min(times)) / max(1e-12, max(times) - min(times))
        return need**2 + time**2

    return min(plans, key=distance)

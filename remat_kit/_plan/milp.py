"""Integer programs, solved by HiGHS through scipy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse


@dataclass(frozen=True)
class Rows:
    """`least <= matrix @ x <= most`, row by row; None where there is no such bound."""

    matrix: Any
    least: Sequence[float] | np.ndarray | None = None
    most: Sequence[float] | np.ndarray | None = None


def minimize(
    cost: np.ndarray, rows: Sequence[Rows], upper: np.ndarray, whole: np.ndarray, gap: float, seconds: float
) -> np.ndarray | None:
    """The x from 0 to `upper`, with whole numbers where `whole` is 1, that costs least and keeps to `rows`.

    Exact to the relative `gap`, or the best that was found after `seconds`; None when there is none.
    """
    kinds: Any = scipy.optimize  # the type of its bounds is wrong in scipy's stubs
    constraints = [
        kinds.LinearConstraint(
            scipy.sparse.csr_array(each.matrix),
            lb=-np.inf if each.least is None else each.least,
            ub=np.inf if each.most is None else each.most,
        )
        for each in rows
    ]
    answer = kinds.milp(
        cost / max(float(cost.max()), 1e-12),
        constraints=constraints,
        integrality=whole,
        bounds=kinds.Bounds(0, upper),
        options={"mip_rel_gap": gap, "time_limit": seconds},
    )
    return answer.x

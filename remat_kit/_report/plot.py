"""The plot of a sweep: need against step time, with the Pareto front and what the device has."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from remat_kit._errors import OutputError
from remat_kit._pareto import Standing, standings, step_seconds
from remat_kit._record import Record
from remat_kit._report import rows
from remat_kit._units import GiB

SUFFIXES = (".png", ".svg")
_FRONT, _OTHER, _LIMIT = "#1b6ca8", "#9a9a9a", "#b5402b"


def check_suffix(path: Path) -> None:
    """Raises OutputError when the plot cannot be written in the format that the name asks for."""
    if path.suffix.lower() not in SUFFIXES:
        raise OutputError(f"a plot cannot be written as {path.name!r}. Use a name that ends in .png or .svg.")


def render(records: Sequence[Record], suffix: str = ".svg") -> bytes:
    """The picture as the content of a file; `suffix` is ".png" or ".svg".

    Records without a need or a step time are left out. Every label has a line of its own at the right edge,
    joined to its point, so that labels never cover each other.
    """
    # Imported here: a report without a picture should not wait for it.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    seconds, source = step_seconds(records)
    points = [
        (second * 1e3, record.need_bytes / GiB, record, standing)
        for record, second, standing in zip(records, seconds, standings(records), strict=True)
        if second is not None and record.need_bytes and standing is not None
    ]
    # A fixed salt and no date: the same records give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "remat-kit", "font.size": 9}):
        figure = Figure(figsize=(9.5, max(4.5, 1.2 + 0.24 * len(points))), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(f"{rows.title(records)}: need against step time" if records else "no records", loc="left")
        axes.set_xlabel(f"step time, ms ({source})")
        axes.set_ylabel("need, GiB (compiled)")
        axes.set_yscale("log")
        axes.grid(alpha=0.25, which="both")
        capacities = {record.capacity_bytes / GiB for _, _, record, _ in points if record.capacity_bytes}
        if points:
            heights = [need for _, need, _, _ in points] + sorted(capacities)
            times = [time for time, _, _, _ in points]
            margin = max((max(times) - min(times)) * 0.06, max(times) * 0.01)
            axes.set_xlim(min(times) - margin, max(times) + margin)
            axes.set_ylim(min(heights) / 1.25, max(heights) * 1.25)
            _draw_points(axes, points)
            _label_points(axes, points)
        for capacity in sorted(capacities):
            axes.axhline(capacity, color=_LIMIT, linewidth=1.2, linestyle="--")
            axes.annotate(
                f"one process can allocate {capacity:,.1f} GiB",
                (0.99, capacity), xycoords=("axes fraction", "data"),
                xytext=(0, -5), textcoords="offset points", ha="right", va="top", color=_LIMIT,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
            )  # fmt: skip
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        out = io.BytesIO()
        kind = suffix.lower().removeprefix(".")
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _draw_points(axes, points: list[tuple[float, float, Record, Standing]]) -> None:
    # Another GEMM backend is another comparison, with a front and a marker of its own.
    backends = list(dict.fromkeys(record.gemm_backend for _, _, record, _ in points))
    for backend, marker in zip(backends, itertools.cycle("osD")):
        own = [point for point in points if point[2].gemm_backend == backend]
        suffix = f" ({backend})" if len(backends) > 1 else ""
        front = sorted((time, need) for time, need, _, standing in own if standing.on_front)
        axes.plot(*zip(*front, strict=True), color=_FRONT, linewidth=1.2, drawstyle="steps-post", zorder=2)
        for on_front, colour, name in ((True, _FRONT, "Pareto front"), (False, _OTHER, "dominated")):
            chosen = [(time, need) for time, need, _, standing in own if standing.on_front is on_front]
            if chosen:
                xy = zip(*chosen, strict=True)
                axes.scatter(*xy, s=36, marker=marker, color=colour, label=name + suffix, zorder=3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 0.0), ncols=1, frameon=False)


def _label_points(axes, points: list[tuple[float, float, Record, Standing]]) -> None:
    """Labels in a column beside the axes, in the order of their points and a line apart."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    several = len({record.gemm_backend for _, _, record, _ in points}) > 1
    ordered = sorted(points, key=lambda point: (point[1], -point[0]))
    wanted = [(math.log(need) - low) / (high - low) for _, need, _, _ in ordered]
    for (time, need, record, standing), height in zip(ordered, _spread(wanted), strict=True):
        name = f"{record.policy} ({record.gemm_backend})" if several else record.policy
        axes.annotate(
            name,
            (time, need), xycoords="data",
            xytext=(1.03, height), textcoords="axes fraction", va="center",
            color=_FRONT if standing.on_front else "#444444",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "shrinkB": 4},
        )  # fmt: skip


def _spread(wanted: list[float]) -> list[float]:
    """Heights in the order of `wanted` (ascending), near to them, apart enough to be read, inside 0 to 1."""
    gap = min(0.048, 1.0 / max(1, len(wanted)))
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    excess = max(0.0, heights[-1] - 1.0) if heights else 0.0
    ceiling = 1.0
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], ceiling) if excess else heights[index]
        ceiling = heights[index] - gap
    return heights

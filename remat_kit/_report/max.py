"""The table of how much fits: a line for each policy, with what proves it."""

import textwrap

from remat_kit._max import Answer, Largest
from remat_kit._report.layout import WIDTH, TextColumn, table
from remat_kit._report.rows import UNKNOWN, bytes_text, milliseconds, options_text

_DONE = ("proved", "bound", "refused above", "fails above")


def render(answer: Answer) -> str:
    """The table as text. What the largest value is proved by stands in its last column, what failed below."""
    question, found = answer.question, answer.largest
    mesh = {axis: size for axis, size in answer.mesh.items() if size > 1}
    target = f"{answer.target} x ({', '.join(f'{n}={s}' for n, s in mesh.items())})" if mesh else answer.target
    title = " ".join(each for each in (answer.workload, options_text(answer.options), "for", target) if each)
    several = len({each.gemm_backend for each in found}) > 1
    fastest = max((each.throughput or 0.0 for each in found), default=0.0)
    names = [f"{each.policy} ({each.gemm_backend})" if several else each.policy for each in found]
    items = next((each.items for each in found if each.items), None)
    columns = [
        TextColumn("policy", tuple(names)),
        TextColumn(question.option, tuple(_value(each) for each in found), right=True),
        TextColumn("need", tuple(_need(each) for each in found), right=True),
        TextColumn("step ms*", tuple(_step(each) for each in found), right=True),
    ]
    if items:
        cells = tuple(
            f"{each.throughput:,.0f}{' <' if each.throughput == fastest else '  '}"
            if each.throughput
            else UNKNOWN + "  "
            for each in found
        )
        columns.append(TextColumn(f"{items}/s*  ", cells, right=True))
    columns += [
        TextColumn("compiles", tuple(str(len(each.tried)) for each in found), right=True),
        TextColumn("because", tuple(each.reason for each in found), least=24),
    ]
    lines = [f"Largest {question.option} of {title}", f"within {answer.limit}", "", *table(columns)]
    lines += ["", *_wrapped(f"* predicted{'; < is the most' if items else ''}. {_assumption(answer)}")]
    lines += [line for each, name in zip(found, names, strict=True) for line in _notes(answer, each, name)]
    return "\n".join(lines) + "\n"


def _value(each: Largest) -> str:
    if each.value is None:
        return UNKNOWN
    return f"{each.value}" if each.kind in _DONE else f">={each.value}"


def _need(each: Largest) -> str:
    if each.record is None or each.record.need_bytes is None:
        return UNKNOWN
    return bytes_text(each.record.need_bytes + (each.record.constant_bytes or 0))


def _step(each: Largest) -> str:
    return milliseconds(each.record.predicted_step_s) if each.record else UNKNOWN


def _assumption(answer: Answer) -> str:
    option = answer.question.option
    steps = sorted({each.step for each in answer.largest})
    of = f"multiples of {', '.join(map(str, steps))} count; " if steps != [1] else ""
    return (
        f"Need: compiled, constants included; {of}the value and the next one were both compiled where it says that the "
        f"next one needs more. Taken for granted: the need grows with {option}, so nothing is looked for beyond the "
        "first that does not fit."
    )


def _notes(answer: Answer, each: Largest, name: str) -> list[str]:
    option, lines = answer.question.option, []
    if each.kind not in ("proved", "bound"):
        lines += ["", *_wrapped(f"{name}: {each.reason}")]
    if each.step_reason:
        lines += ["", *_wrapped(f"{name}: {option} counts in multiples of {each.step}, as {each.step_reason}")]
    if each.odd:
        small, large = each.odd
        lines += ["", *_wrapped(
            f"{name}: {option}={small} needs more than {option}={large}, so the need is not monotone here, and a value "
            "beyond the answer may fit, too. Look with --at-least."
        )]  # fmt: skip
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)

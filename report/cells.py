"""A figure as the cell of a table: numbers with their digits, times with their range, gains with their
mark."""

from report.figures import Line, Ratio, ratio

LAUNCH = {True: "captured", False: "launched", None: "-"}


def number(value: float | None, digits: str = ",.1f") -> str:
    """A number as the format `digits` writes it, and never as -0.0; a dash for None."""
    if value is None:
        return "-"
    text = f"{value:{digits}}"
    is_zero = not any(digit in text for digit in "123456789")
    return text.removeprefix("-") if is_zero else text


def milliseconds(ms: float | None) -> str:
    """`159.0`, `9.87`."""
    return number(ms, ",.1f" if ms is None or ms >= 10 else ".2f")


def dtype(name: str | None) -> str:
    """`BF16` of bfloat16."""
    return {None: "-", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}.get(name, name)


def scaling(recipe: str | None) -> str:
    """How FP8's scales are found, by the words of a recipe: `delayed`, from earlier steps, or `current`, from
    the tensor itself. Transformer Engine names it, and torchao's recipes are all current."""
    if recipe is None:
        return "-"
    if "DelayedScaling" in recipe:
        return "delayed"
    return "current" if "CurrentScaling" in recipe or recipe.startswith("torchao") else recipe[:20]


def three_digits(value: float | None) -> str:
    """`145`, `92`, `7.66`: three significant digits, and whole numbers from 100 on."""
    return number(value, ".3g" if value is None or value < 100 else ",.0f")


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{round(100 * share, digits) or 0.0:.{digits}f} %"  # never -0.0


def tflops(flops_per_s: float | None) -> str:
    """In TFLOP/s: whole numbers from 10 on, below with three significant digits."""
    if not flops_per_s:
        return "-"
    rate = flops_per_s / 1e12
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def time_or_status(line: Line, with_range: bool = False) -> str:
    """`281.4?`, and `with_range` of several passes `281.4 (281.0-281.8)`; or the status of an untimed row."""
    if not line.ms:
        return line.row.status
    time = f"{milliseconds(line.ms)}{line.mark}"
    if with_range and line.passes > 1:
        time += f" ({milliseconds(line.low_ms)}-{milliseconds(line.high_ms)})"
    return time


def gain(faster: Ratio | None) -> str:
    """`1.57`, `20.0?`."""
    if faster is None:
        return "-"
    digits = 1 if faster.value >= 10 else 2
    return f"{faster.value:.{digits}f}{faster.mark}"


def gain_over(before: Line, line: Line) -> str:
    """How many times faster a step is than the very step before it; `fits` where that one ran out of memory,
    and the status of a step without a time."""
    if not line.ms:
        return line.row.status
    return "fits" if before.row.status == "oom" else gain(ratio(line, before))


def only_filled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that none of them fills."""
    filled = {name for row in rows for name, cell in row.items() if cell != "-"}
    return [_columns(row, filled) for row in rows]


def _columns(row: dict[str, str], names: set[str]) -> dict[str, str]:
    return {name: cell for name, cell in row.items() if name in names}

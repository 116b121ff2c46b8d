"""A figure as the cell of a table: numbers with their digits, times with their range, gains with their mark.
A dash stands for None."""

from report.figures import Line, Ratio, ratio

SCALING = {
    "DelayedScaling": "delayed",
    "CurrentScaling": "current",
    "torchao": "current",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
    "Float8BlockScaling": "by blocks",
}
LAUNCH = {True: "captured", False: "launched", None: "-"}
DTYPES = {None: "-", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def number(value: float | None, digits: str = ",.1f") -> str:
    """A number as the format `digits` writes it, and never as -0.0."""
    if value is None:
        return "-"
    text = f"{value:{digits}}"
    is_zero = not any(digit in text for digit in "123456789")
    return text.removeprefix("-") if is_zero else text


def milliseconds(ms: float | None) -> str:
    """`159.0`, `9.87`, `0.041`."""
    if ms is None or ms >= 10:
        return number(ms)
    return number(ms, ".2f" if ms == 0 or abs(ms) >= 0.1 else ".3f")


def three_digits(value: float | None) -> str:
    """`145`, `92`, `7.66`: three significant digits, and whole numbers from 100 on."""
    return number(value, ".3g" if value is None or value < 100 else ",.0f")


def whole(value: float | None) -> str:
    return number(value, ",.0f")


def share(value: float | None) -> str:
    return "-" if not value else f"{value:.0%}"


def percent(value: float) -> str:
    return f"{number(100 * value)} %"


def tflops(flops_per_s: float | None) -> str:
    """In TFLOP/s: whole numbers from 10 on, below with three significant digits."""
    if not flops_per_s:
        return "-"
    rate = flops_per_s / 1e12
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def dtype(name: str | None) -> str:
    """`BF16` of bfloat16."""
    return DTYPES.get(name, name)


def scaling(recipe: str | None) -> str:
    """How FP8's scales are found, by the words of a recipe: `delayed`, from earlier steps, `current`, from
    the tensor itself, or one of each block of it, of 32 numbers in `MXFP8`. Transformer Engine names it,
    and torchao's recipes are all current."""
    if recipe is None:
        return "-"
    return next((words for name, words in SCALING.items() if name in recipe), recipe[:20])


def time_or_status(line: Line) -> str:
    """`281.4?`, or the status of an untimed row."""
    return f"{milliseconds(line.ms)}{line.mark}" if line.ms else line.row.status


def time_with_range(line: Line) -> str:
    """The same, with the range of several passes: `281.4 (281.0-281.8)`."""
    if line.passes == 1:
        return time_or_status(line)
    low, high = line.range_ms
    return f"{time_or_status(line)} ({milliseconds(low)}-{milliseconds(high)})"


def gain(faster: Ratio | None) -> str:
    """`1.57`, `20.0?`."""
    if faster is None:
        return "-"
    return f"{faster.value:.{1 if faster.value >= 10 else 2}f}{faster.mark}"


def gain_over(before: Line, line: Line) -> str:
    """How many times faster a step is than the very step before it; `fits` where that one ran out of memory,
    and the status of a step without a time."""
    if not line.ms:
        return line.row.status
    return "fits" if before.row.status == "oom" else gain(ratio(line, before))

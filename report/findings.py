"""What one machine's records say of a claim, for report/claims.py. A function raises KeyError where a record lacks."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from report.analysis import is_timed
from report.records import Records

HOLDS, FAILS, HIDDEN = "holds", "does not hold here", "hidden by the spread"
CLOSE = 1.25  # two single times that differ by less show no difference
SMALLEST_FP16 = 2.0**-25  # below it a number rounds to zero in FP16


class Finding(NamedTuple):
    measured: str
    verdict: str


def said(values: dict[str, float], unit: str = "x", digits: int = 2) -> str:
    return ", ".join(f"{name} {value:.{digits}f}{unit}" for name, value in values.items())


def holds(condition: bool) -> str:
    return HOLDS if condition else FAILS


def within(values: dict[str, float], low: float, high: float, unit: str = "x", more="more", less="less") -> Finding:
    """The verdict on a claimed range: it holds for all of these, for some of them, or lies beside them."""
    places = {
        HOLDS: [name for name, value in values.items() if low <= value <= high],
        more: [name for name, value in values.items() if value > high],
        less: [name for name, value in values.items() if value < low],
    }
    found = {place: names for place, names in places.items() if names}
    if len(found) > 1:
        return Finding(
            said(values, unit), "; ".join(f"{place} for {', '.join(names)}" for place, names in found.items())
        )
    (place,) = found
    return Finding(said(values, unit), HOLDS if place == HOLDS else f"{place} here")


speeds_within = partial(within, more="faster", less="slower")


# --- findings, by record -------------------------------------------------------------------------


def technique_and_steps(name: str, before: str, after: str, low: float, high: float, records: Records) -> Finding:
    """A technique, in the experiment, and the steps of the ladder that add it."""
    alone = records.measured(lambda records: technique(name, low, high, records))
    steps = records.measured(lambda records: records.faster(before, after), {})
    if not steps:
        return technique(name, low, high, records)
    if alone and alone.verdict != HIDDEN:
        speed = records.experiments["techniques"]["techniques"][name]["speed"]
        return speeds_within({f"{name} in the experiment": speed} | steps, low, high)
    found = speeds_within(steps, low, high)
    return Finding(
        f"{alone.measured} (hidden by the spread), {found.measured}" if alone else found.measured, found.verdict
    )


def fp8(records: Records) -> Finding:
    products, steps = records.experiments["precision"]["products"], records.faster("3", "4")
    if not products["FP8"]["seconds"]:
        raise KeyError("FP8")
    product = products["BF16"]["seconds"] / products["FP8"]["seconds"]
    return speeds_within(
        {"one product": product} | {f"step of {name}": ratio for name, ratio in steps.items()}, 1.8, 2.2
    )


def fused_attention_first(records: Records) -> Finding:
    gains = {before + after: records.faster(before, after) for before, after in ("01", "12", "23")}
    runs = {run: ratio for run, ratio in gains["12"].items() if run in gains["01"] and run in gains["23"]}
    if not runs:
        raise KeyError("steps 0 to 3")
    largest = [run for run, ratio in runs.items() if ratio > max(gains["01"][run], gains["23"][run])]
    tensor_cores = {f"step 0 to 1 at {run}": gains["01"][run] for run in runs}
    attention = {f"step 1 to 2 at {run}": ratio for run, ratio in runs.items()}
    verdict = HOLDS if len(largest) == len(runs) else f"holds only for {', '.join(largest)}" if largest else FAILS
    return Finding(said(tensor_cores | attention, digits=1), verdict)


def attention_traffic(low: float, high: float, records: Records) -> Finding:
    by_hand, fused = records.attention_bytes()
    shape = ", ".join(f"{name} {size}" for name, size in records.experiments["attention-traffic"]["shape"].items())
    return within({f"forward and backward at {shape}:": by_hand / fused}, low, high)


def attention_memory(records: Records) -> Finding:
    fused = records.experiments["attention"]["attention"]["SDPA flash"]
    if not fused:
        raise KeyError("lengths")
    first, last = min(fused, key=int), max(fused, key=int)
    growth, length = fused[last]["peak_bytes"] / fused[first]["peak_bytes"], int(last) / int(first)
    return Finding(f"length x{length:g}, memory x{growth:.1f}", holds(growth < 1.25 * length))


def attention_speeds(records: Records) -> Finding:
    """By hand over the fastest fused kernel, forward and backward, by length."""
    times = records.experiments["attention"]["attention"]
    fused = [cells for name, cells in times.items() if name not in ("by hand", "SDPA math")]
    least = {T: min(cells[T]["seconds"] for cells in fused if cells.get(T)) for T in times["by hand"]}
    return speeds_within({f"T {T}": cell["seconds"] / least[T] for T, cell in times["by hand"].items()}, 2, 5)


def pointwise_fusion(records: Records) -> Finding:
    rows = records.experiments["fusion"]["cases"]["sigmoid(relu(x*w+b))"]
    speed, by_bytes = (rows["eager"][key] / rows["compiled"][key] for key in ("seconds", "bytes"))
    return Finding(f"{speed:.2f}x, by bytes {by_bytes:.2f}x", holds(0.8 <= speed / by_bytes <= 1.25))


def fused_speeds(records: Records) -> Finding:
    cases = records.experiments["fusion"]["cases"]
    chosen = ("sigmoid(relu(x*w+b))", "x / x.sum()")
    return speeds_within(
        {name: cases[name]["eager"]["seconds"] / cases[name]["compiled"]["seconds"] for name in chosen}, 2, 5
    )


def product_epilogue(records: Records) -> Finding:
    rows = records.experiments["fusion"]["cases"]["relu(A@B+c)"]
    launches, speed = rows["compiled"]["launches"], rows["eager"]["seconds"] / rows["compiled"]["seconds"]
    return Finding(f"{launches} launches, {speed:.2f}x", holds(launches == 1))


def compile_modes(records: Records, compiles: str, fastest: str = "", slowest: str = "") -> Finding:
    """Which mode compiles fastest, and whose code is the fastest or the slowest. Each mode ran in two processes: one
    that compiled everything, and one that found a cache."""
    modes = records.experiments["compile-modes"]["modes"]
    if "reduce-overhead" not in modes:
        raise KeyError("reduce-overhead")
    seconds = {name: row["cold"]["first_steps_s"] for name, row in modes.items()}
    steps = {run: {name: row[run]["step_s"] for name, row in modes.items()} for run in ("cold", "warm")}
    code = {(max if slowest else min)(of_run, key=of_run.get) for of_run in steps.values()}
    close = [name for name, taken in seconds.items() if taken < CLOSE * min(seconds.values())]
    quick = f"{' and '.join(close)} are about as fast" if len(close) > 1 else holds(close == [compiles])
    good = "two processes disagree" if len(code) > 1 else holds(code == {fastest or slowest})
    measured = [f"{name} compiles in {seconds[name]:.1f} s, a step takes {steps['cold'][name] * 1e3:.2f} ms, or "
                f"{steps['warm'][name] * 1e3:.2f} in a process that found a cache" for name in modes]  # fmt: skip
    eager = records.experiments["compile-modes"]["eager"]["step_s"]
    measured.append(f"an eager step takes {eager * 1e3:.2f} ms")
    return Finding("; ".join(measured), quick if quick == good else f"compilation: {quick}; code: {good}")


def waits(records: Records) -> dict[str, float]:
    rows = records.experiments["sync-points"]["operations"]
    found = {name.replace(",", ""): row["host_s"]["empty queue"] * 1e6 for name, row in rows.items() if row["waits"]}
    if not found:
        raise KeyError("a CPU does not wait")
    return found


def constant_sync(records: Records) -> Finding:
    return within(waits(records), 10, 15, " us")


def sync_share(records: Records) -> Finding:
    item = waits(records)[".item()"]
    shares = {"25 ms": item / 25_000, "18 us": item / 18}
    near = [name for name, claimed in (("25 ms", 0.01), ("18 us", 0.5)) if 0.8 <= shares[name] / claimed <= 1.25]
    text = ", ".join(f"{share:.2%} of {name}" for name, share in shares.items())
    verdict = HOLDS if len(near) == 2 else f"holds only for {near[0]}" if near else FAILS
    return Finding(f"`.item()` takes {item:.1f} us: {text}", verdict)


def any_waits(records: Records) -> Finding:
    row = records.experiments["sync-points"]["operations"]["if tensor.any()"]
    if not row["waits"]:
        raise KeyError("a CPU does not wait")
    empty, late = (row["host_s"][queue] * 1e6 for queue in ("empty queue", "after a large kernel"))
    return Finding(f"{empty:.0f} us, after a large kernel {late:.0f} us", holds(late > 2 * empty))


def transposed(records: Records) -> Finding:
    rows = records.experiments["contiguity"]["operations"]
    return within({name.replace(",", ""): row["ratio"] for name, row in rows.items()}, 2, 10)


def marks_fusion(records: Records) -> Finding:
    """The node of the experiment's inputs, which are FP32, and the kernels of the ladder's steps in mixed precision."""
    nodes = ", ".join(records.experiments["autograd"]["sdpa_nodes"])
    settings = [row.settings for run in records.runs.values() for row in run.steps if is_timed(row)]
    mixed = {one.attention_kernel for one in settings if one.amp_dtype != "float32"}
    others = ", ".join(sorted(mixed - {"math", "efficient", "by hand", None}))
    if nodes != "ScaledDotProductEfficientAttentionBackward0":
        return Finding(nodes, FAILS)
    if others:
        return Finding(f"{nodes} in FP32; in mixed precision the steps run {others}", "holds only in FP32")
    return Finding(nodes, HOLDS)


def fewer_nodes(records: Records) -> Finding:
    variants = records.experiments["autograd"]["variants"]
    by_hand, fused = ([cell["nodes"] for cell in variants[name]["cells"]] for name in ("by hand", "fused"))
    merged = [hand - one + 1 for hand, one in zip(by_hand, fused, strict=True)]  # the last one has batch 1
    at_one = f", or {merged[-1]} at batch 1," * (merged[-1] != merged[0])
    text = f"{merged[0]} nodes{at_one} become 1; the attention layer has {fused[0]} nodes instead of {by_hand[0]}"
    enough = [count >= 20 for count in merged]
    return Finding(text, HOLDS if all(enough) else "holds only from batch 2 on" if all(enough[:-1]) else FAILS)


def fixed_graph(records: Records) -> Finding:
    cells = records.experiments["autograd"]["variants"]["by hand"]["cells"]
    nodes = [cell["nodes"] for cell in cells]  # batch, twice the batch, twice the length, batch 1
    if len(set(nodes)) == 1:
        return Finding(f"{nodes[0]} nodes at every shape", HOLDS)
    if len(set(nodes[:3])) == 1:
        return Finding(f"{nodes[0]} nodes, and {nodes[3]} at batch 1", "holds only from batch 2 on")
    return Finding(", ".join(map(str, nodes)) + " nodes", FAILS)


def small_products(records: Records) -> Finding:
    roofline = records.experiments["roofline"]
    name, row = next((n, r) for n, r in roofline["operations"].items() if n.startswith("product n"))
    by_bytes = row["bytes"] / roofline["copy_bytes_per_s"]
    text = f"{name} takes {row['seconds'] * 1e6:.1f} us, moving its bytes {by_bytes * 1e6:.2f} us"
    return Finding(text, holds(row["seconds"] < 2 * by_bytes))


def technique(name: str, low: float, high: float, records: Records) -> Finding:
    cell = records.experiments["techniques"]["techniques"][name]
    found = speeds_within({name: cell["speed"]}, low, high)
    return Finding(found.measured, HIDDEN) if cell["inside_spread"] else found


def host_us(call: str, records: Records) -> float:
    return records.experiments["host-cost"]["times"][call] * 1e6


def dispatch(records: Records) -> Finding:
    return within({"x * 2 on one number": 1e3 / host_us("x * 2", records)}, 250, 310, " thousand a second")


def views(records: Records) -> Finding:
    view, operator = host_us("x.t()", records), host_us("x * 2", records)
    free = HOLDS if view < 0.1 * operator else "does not hold for the host"
    return Finding(f"x.t() takes {view:.2f} us of the host, x * 2 {operator:.2f}", free)


def element_loop(records: Records) -> Finding:
    n = records.experiments["host-cost"]["elements"]
    ratio = host_us(f"a loop over {n} elements", records) / host_us("vector.sum()", records)
    return Finding(f"{n} elements: {ratio:.0f}x", holds(ratio > 100))


def guards(records: Records) -> Finding:
    names = [f"x * 2 compiled, {n}" for n in ("1 input", "33 inputs")]
    few, many = (host_us(name, records) for name in names)
    times = records.experiments["host-cost"]["times"]
    (_, most), (least, _) = (times[f"{name}_p25_p75"] for name in names)
    share = (many - few) / many
    text = f"of {many:.1f} us, a compiled function with 33 inputs, the guards of 32 take {share:.0%}"
    return Finding(text, holds(share > 0.05) if least > most else HIDDEN)


def warm_up(records: Records) -> Finding:
    ratio = records.experiments["host-cost"]["first_call_s"] * 1e6 / host_us("x * 2 compiled, 1 input", records)
    return Finding(f"first call of a compiled function {ratio:.0f}x", holds(ratio > 2))


def one_kernel(names: tuple[str, ...], records: Records) -> Finding:
    counts = {name: records.experiments["rewrites"]["cases"][name]["launches"] for name in names}
    text = ", ".join(f"{name}: {count} kernel{'s' * (count != 1)}" for name, count in counts.items())
    return Finding(text, holds(all(count == 1 for count in counts.values())))


def other_rounding(records: Records) -> Finding:
    errors = records.experiments["rewrites"]["errors"]
    text = f"error in BF16 {errors['compiled']:.1e}, eager {errors['eager']:.1e}"
    return Finding(text, holds(errors["compiled"] != errors["eager"]))


def loss_scaling(records: Records) -> Finding:
    record = records.experiments["learning"]
    trained, logits = record["trained"], record["config"]["vocab_size"] * record["tokens"]
    if logits < 1 / SMALLEST_FP16:
        raise KeyError("so few logits that their gradients are not too small for FP16")
    lost = {name: trained[name]["zero_share"] for name in ("BF16", "FP16", "FP16, loss scaled")}
    text = ", ".join(f"{name} {share:.0%}" for name, share in lost.items())
    return Finding(
        f"gradients of the logits that become zero in the first step: {text}", holds(lost["FP16"] > 0.5 > lost["BF16"])
    )


def initialization(records: Records) -> Finding:
    trained = records.experiments["learning"]["trained"]
    plain, default = (trained[name]["last"] for name in ("FP32", "FP32, default initialization"))
    ends = "no number" if default is None else f"{default:.2f}"
    steps = records.experiments["learning"]["steps"]
    return Finding(
        f"last loss after {steps} steps {plain:.2f}, default {ends}", holds(default is None or default > plain + 0.1)
    )


def shared_memory(records: Records) -> Finding:
    record = records.experiments["memory-hierarchy"]
    dram = record["copy_bytes_per_s"]
    ratios = {name: row["bytes_per_s"] / dram for name, row in record["on_chip"].items()}
    found = within(ratios, 5, 20)
    return Finding(
        f"{found.measured} of DRAM's bandwidth; a multiply-add counts as reading three registers", found.verdict
    )


def occupancy(records: Records) -> Finding:
    rows = records.experiments["memory-hierarchy"]["occupancy"].items()
    rates = {int(k) * 4 / 64: row["bytes_per_s"] for k, row in rows}
    enough = min(full for full, rate in rates.items() if rate > 0.9 * max(rates.values()))
    return Finding(f"{enough:.0%} of the warps give 90 % of the bandwidth", holds(enough < 1))


def triton_product(records: Records) -> Finding:
    products = records.experiments["precision"]["products"]
    by_hand = products["BF16, by hand in Triton"]["seconds"]
    return speeds_within({"BF16 product": products["BF16"]["seconds"] / by_hand}, 0.9, 1.1)

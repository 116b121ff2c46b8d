"""What one machine's records say of a claim, for report/claims.py. A function raises KeyError where a record lacks."""

from __future__ import annotations

from typing import NamedTuple

from report.records import Records

HOLDS, FAILS = "holds", "does not hold here"


class Finding(NamedTuple):
    measured: str
    verdict: str


def said(values: dict[str, float], unit: str = "x", digits: int = 2) -> str:
    return ", ".join(f"{name} {value:.{digits}f}{unit}" for name, value in values.items())


def holds(condition: bool) -> str:
    return HOLDS if condition else FAILS


def within(values: dict[str, float], low: float, high: float, unit: str = "x") -> Finding:
    """The verdict on a claimed range: it holds for all of these, for some of them, or lies beside them."""
    places = {
        "holds for": [name for name, value in values.items() if low <= value <= high],
        "more for": [name for name, value in values.items() if value > high],
        "less for": [name for name, value in values.items() if value < low],
    }
    found = {place: names for place, names in places.items() if names}
    whole = {"holds for": HOLDS, "more for": "more here", "less for": "less here"}
    parts = [f"{place} {', '.join(names)}" for place, names in found.items()]
    return Finding(said(values, unit), "; ".join(parts) if len(found) > 1 else whole[next(iter(found))])


# --- findings, by record -------------------------------------------------------------------------


def steps_within(before: str, after: str, low: float, high: float, records: Records) -> Finding:
    return within(records.faster(before, after), low, high)


def fp8(records: Records) -> Finding:
    products, steps = records.experiments["precision"]["products"], records.faster("3", "4")
    if not products["FP8"]["seconds"]:
        raise KeyError("FP8")
    product = products["BF16"]["seconds"] / products["FP8"]["seconds"]
    return within({"one product": product} | {f"step of {name}": ratio for name, ratio in steps.items()}, 1.8, 2.2)


def fused_attention_first(records: Records) -> Finding:
    gains = {before + after: records.faster(before, after) for before, after in ("01", "12", "23")}
    runs = {run: ratio for run, ratio in gains["12"].items() if run in gains["01"] and run in gains["23"]}
    if not runs:
        raise KeyError("steps 0 to 3")
    largest = [run for run, ratio in runs.items() if ratio > max(gains["01"][run], gains["23"][run])]
    tensor_cores = {f"{run}, tensor cores": gains["01"][run] for run in runs}
    attention = {f"{run}, fused attention": ratio for run, ratio in runs.items()}
    verdict = HOLDS if len(largest) == len(runs) else f"holds only for {', '.join(largest)}" if largest else FAILS
    return Finding(said(tensor_cores | attention, digits=1), verdict)


def attention_traffic(records: Records) -> Finding:
    by_hand, fused = records.attention_bytes()
    return within({"forward and backward": by_hand / fused}, 8, 10)


def attention_memory(records: Records) -> Finding:
    fused = records.experiments["attention"]["attention"]["SDPA flash"]
    if not fused:
        raise KeyError("lengths")
    first, last = min(fused, key=int), max(fused, key=int)
    growth, length = fused[last]["peak_bytes"] / fused[first]["peak_bytes"], int(last) / int(first)
    return Finding(f"length x{length:g}, memory x{growth:.1f}", holds(growth < 1.25 * length))


def pointwise_fusion(records: Records) -> Finding:
    rows = records.experiments["fusion"]["cases"]["sigmoid(relu(x*w+b))"]
    speed, by_bytes = (rows["eager"][key] / rows["compiled"][key] for key in ("seconds", "bytes"))
    return Finding(f"{speed:.2f}x, by bytes {by_bytes:.2f}x", holds(0.8 <= speed / by_bytes <= 1.25))


def product_epilogue(records: Records) -> Finding:
    rows = records.experiments["fusion"]["cases"]["relu(A@B+c)"]
    launches, speed = rows["compiled"]["launches"], rows["eager"]["seconds"] / rows["compiled"]["seconds"]
    return Finding(f"{launches} launches, {speed:.2f}x", holds(launches == 1))


def compile_modes(records: Records) -> Finding:
    modes = records.experiments["compile-modes"]["modes"]
    cold, step = ({name: modes[name][run][key] for name in modes} for run, key in
                  (("cold", "first_steps_s"), ("warm", "step_s")))  # fmt: skip
    compiles_fastest, runs_fastest = min(cold, key=cold.get), min(step, key=step.get)
    measured = ", ".join(f"{name} {cold[name]:.1f} s and {step[name] * 1e3:.2f} ms a step" for name in modes)
    if "reduce-overhead" not in modes:
        raise KeyError("reduce-overhead")
    return Finding(measured, holds((compiles_fastest, runs_fastest) == ("default", "max-autotune")))


def waits(records: Records) -> dict[str, float]:
    rows = records.experiments["sync-points"]["operations"]
    found = {name: row["host_s"]["empty queue"] * 1e6 for name, row in rows.items() if row["waits"]}
    if not found:
        raise KeyError("a CPU does not wait")
    return found


def constant_sync(records: Records) -> Finding:
    return within(waits(records), 10, 15, " us")


def sync_share(records: Records) -> Finding:
    item = waits(records)[".item()"]
    shares = [item / (item + work) for work in (25_000, 18)]
    near = 0.005 < shares[0] < 0.015 and 0.4 < shares[1] < 0.6
    return Finding(f"{shares[0]:.2%} of 25 ms and {shares[1]:.0%} of 18 us", holds(near))


def any_waits(records: Records) -> Finding:
    row = records.experiments["sync-points"]["operations"]["if tensor.any()"]
    if not row["waits"]:
        raise KeyError("a CPU does not wait")
    empty, late = (row["host_s"][queue] * 1e6 for queue in ("empty queue", "after a large kernel"))
    return Finding(f"{empty:.0f} us, after a large kernel {late:.0f} us", holds(late > 2 * empty))


def transposed(records: Records) -> Finding:
    rows = records.experiments["contiguity"]["operations"]
    return within({name: row["ratio"] for name, row in rows.items()}, 5, 20)


def marks_fusion(records: Records) -> Finding:
    nodes = ", ".join(records.experiments["autograd"]["sdpa_nodes"])
    return Finding(nodes, holds(nodes == "ScaledDotProductEfficientAttentionBackward0"))


def fewer_nodes(records: Records) -> Finding:
    variants = records.experiments["autograd"]["variants"]
    hand, fused = (variants[name]["cells"][0]["nodes"] for name in ("by hand", "fused"))
    merged = hand - fused + 1
    return Finding(f"{merged} nodes become 1, and a block has {fused} instead of {hand}", holds(merged >= 20))


def fixed_graph(records: Records) -> Finding:
    cells = records.experiments["autograd"]["variants"]["by hand"]["cells"]
    nodes = [cell["nodes"] for cell in cells]  # batch, twice the batch, twice the length, batch 1
    if len(set(nodes)) == 1:
        return Finding(f"{nodes[0]} nodes at every shape", HOLDS)
    if len(set(nodes[:3])) == 1:
        return Finding(f"{nodes[0]} nodes, with batch 1 {nodes[3]}", "holds only from batch 2 on")
    return Finding(", ".join(map(str, nodes)) + " nodes", FAILS)


def small_products(records: Records) -> Finding:
    roofline = records.experiments["roofline"]
    name, row = next((n, r) for n, r in roofline["operations"].items() if n.startswith("product n"))
    by_bytes = row["bytes"] / roofline["copy_bytes_per_s"]
    text = f"{name} takes {row['seconds'] * 1e6:.1f} us, moving its bytes {by_bytes * 1e6:.2f} us"
    return Finding(text, holds(row["seconds"] < 2 * by_bytes))


def technique(name: str, low: float, high: float, records: Records) -> Finding:
    cell = records.experiments["techniques"]["techniques"][name]
    found = within({name: cell["speed"]}, low, high)
    hidden = cell["inside_spread"] if "inside_spread" in cell else cell["holds"] is None  # as older records say it
    return Finding(found.measured, "hidden by the spread") if hidden else found


def host_us(call: str, records: Records) -> float:
    return records.experiments["host-cost"]["times"][call] * 1e6


def dispatch(records: Records) -> Finding:
    return within({"x * 2 on one number": host_us("x * 2", records)}, 3.2, 4, " us")


def views(records: Records) -> Finding:
    view, operator = host_us("x.t()", records), host_us("x * 2", records)
    free = HOLDS if view < 0.1 * operator else "does not hold for the host"
    return Finding(f"x.t() takes {view:.2f} us of the host, x * 2 {operator:.2f}", free)


def element_loop(records: Records) -> Finding:
    n = records.experiments["host-cost"]["elements"]
    ratio = host_us(f"a loop over {n} elements", records) / host_us("vector.sum()", records)
    return Finding(f"{n} elements: {ratio:.0f}x", holds(ratio > 100))


def guards(records: Records) -> Finding:
    few, many = (host_us(f"x * 2 compiled, {n}", records) for n in ("1 input", "33 inputs"))
    added = (many - few) / 32
    return Finding(f"{added * 1e3:.0f} ns a tensor; compiled {few:.1f} us", holds(added < 1))


def warm_up(records: Records) -> Finding:
    ratio = records.experiments["host-cost"]["first_call_s"] * 1e6 / host_us("x * 2 compiled, 1 input", records)
    return Finding(f"first call of a compiled function {ratio:.0f}x", holds(ratio > 2))


def one_kernel(names: tuple[str, ...], records: Records) -> Finding:
    counts = {name: records.experiments["rewrites"]["cases"][name]["launches"] for name in names}
    return Finding(said(counts, " kernel(s)", 0), holds(all(count == 1 for count in counts.values())))


def same_numbers(records: Records) -> Finding:
    errors = records.experiments["rewrites"]["errors"]
    text = f"error {errors['compiled']:.1e}, eager {errors['eager']:.1e}"
    return Finding(text, holds(errors["compiled"] == errors["eager"]))


def loss_scaling(records: Records) -> Finding:
    trained = records.experiments["learning"]["trained"]
    lost = {name: trained[name]["zero_share"] for name in ("BF16", "FP16", "FP16, loss scaled")}
    text = ", ".join(f"{name} loses {share:.0%} of the logits' gradients" for name, share in lost.items())
    needed = lost["FP16"] > 0.5 > lost["BF16"]
    return Finding(text, holds(needed))


def initialization(records: Records) -> Finding:
    trained = records.experiments["learning"]["trained"]
    plain, default = (trained[name]["last"] for name in ("FP32", "FP32, default initialization"))
    ends = "no number" if default is None else f"{default:.2f}"
    return Finding(f"last loss {plain:.2f}, default {ends}", holds(default is None or default > plain + 0.1))


def shared_memory(records: Records) -> Finding:
    record = records.experiments["memory-hierarchy"]
    dram = record["copy_bytes_per_s"]
    ratios = {name: row["bytes_per_s"] / dram for name, row in record["on_chip"].items()}
    return Finding(f"of DRAM's bandwidth: {said(ratios, digits=0)}", holds(5 < ratios["L1 or shared memory"] < 20))


def occupancy(records: Records) -> Finding:
    rows = records.experiments["memory-hierarchy"]["occupancy"].items()
    rates = {int(k) * 4 / 64: row["bytes_per_s"] for k, row in rows}
    enough = min(full for full, rate in rates.items() if rate > 0.9 * max(rates.values()))
    return Finding(f"{enough:.0%} of the warps give 90 % of the bandwidth", holds(enough < 1))


def triton_product(records: Records) -> Finding:
    products = records.experiments["precision"]["products"]
    by_hand = products["BF16, by hand in Triton"]["seconds"]
    return within({"BF16 product": products["BF16"]["seconds"] / by_hand}, 0.9, 1.1)

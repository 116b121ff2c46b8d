"""The one builder of fixture runs: whole ones, with every way to end, of a CPU, by a hostile hand; and their files."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem

from conftest import ROOT, scratch

from common import record as r
from common import traced as t
from common.record import write_json, write_run
from report.load import read_run

RECORDED = ROOT / "docs" / "results" / "h200" / "gpt3-6.7b-slice" / "results.json"
WORKLOAD = r.Workload(
    preset="tiny", n_layer=2, n_head=4, n_embd=128, seq_len=1024, vocab_size=256, batch_size=2, parameters=600_000,
    tokens_per_step=2048, flops_per_step=8_400_000_000, data=r.Data("text", 10_000, "0"), seed=1, lr=0.001, warmup=1,
    steps=3,
)  # fmt: skip
RATES = (5e13, 3e14, 7e14, 1.3e15)
ROOFS = r.Roofs(
    *RATES, {"fp32": 5.1e13, "tf32": 4e14, "bf16": 8e14, "fp8": 1.6e15}, 4e12, [], r.ProductRate(*RATES),
    r.Rates(None, None, 9e14), {"bf16": r.Conditions(1480.0, 699.0, 1980.0, 500.0)},
    notes=["fp4 not measured: too new"],
)  # fmt: skip
HOSTILE = {
    "escapes": "\x1b[31m\u202e\u2066\x9b2J<script>alert(1)</script>\n# x\r\x07",
    "image": "![x](https://a.example/x.png)",
    "link": "[x](javascript:alert(1))|<b onload=a()>`c`",
    "backslash": "\\[x\\](javascript:alert(1))\\|",
}


def reference(ms, copy_ms=4.0, mhz=1800.0):
    return r.Reference([ms, ms], [copy_ms, copy_ms], [mhz, mhz])


def repeated(name, *passes, **fields):
    """A row as the merge makes it of passes with these medians."""
    row = step(name, sorted(passes)[len(passes) // 2], **fields)
    row.repetitions = [r.Repetition(timing(ms), "2026-01-01", row.reference_ms, 5.0, 1800.0) for ms in passes]
    return row


def timing(ms):
    known = {"median_ms": ms, "p25_ms": ms * 0.995, "p75_ms": ms * 1.005}
    return r.Timing(warmup_s=1.0, step_ms=[ms, ms * 0.99, ms * 1.01], **known)


def step(name, ms=100.0, status="ok", **fields):
    timed = {
        "timing": timing(ms),
        "tokens_per_s": 2048 / ms * 1e3, "model_flops_per_s": 8.4e9 / ms * 1e3, "peak_allocated_bytes": 3 * 2**30,
        "loss": [4.0, 3.0, 2.0, 1.0 + ms / 1e4],
    }  # fmt: skip
    return r.Row(name, **{"source": "source\n", "status": status} | (timed if status == "ok" else {}) | fields)


def profile(ms, names=("gemm", "softmax"), categories=("matrix products", "attention"), times=None, **fields):
    times = times or [ms / len(names)] * len(names)
    kernels = [r.Kernel(*kernel, 1) for kernel in zip(names, categories, times, strict=True)]
    shares = {"compute": 0.6, "memory": 0.4, "launch": 0.0}
    whole = r.Profile(ms, 3, {k.category: r.CategoryTime(k.ms, 1) for k in kernels}, kernels, len(names), ms, 0.0,
                      30, "compute", shares)  # fmt: skip
    return replace(whole, **fields)


def run(*steps, peers=(), roofs=None, workload=WORKLOAD, **environment):
    known = {"device": "GPU", "device_type": "cuda", "torch": "2.x", "commit": "abc", "dirty": False}
    return r.Run("./run_all.sh", "2026-01-01", r.Environment(**known | environment), workload, list(steps), roofs,
               list(peers))  # fmt: skip


def recorded():
    return read_run(RECORDED)


def predicted():
    """The recorded run with measured roofs, and a prediction beside every step."""
    made = replace(recorded(), roofs=ROOFS)
    for row in made.steps:
        row.predicted_ms = 1.04 * row.timing.median_ms
    return made


def older():
    """The recorded run without what older records do not hold: predictions, a block's kernels, memory in the step."""
    made = recorded()
    for row in made.steps:
        row.predicted_ms = row.memory = row.profile.block = None
    return made


def memory_use():
    """Activations come in forward and go in backward; the optimizer's states are there all the time."""
    held = {"optimizer": [2, 2, 2, 2, 2, 2], "activations": [0, 2, 4, 2, 0, 0], "gradients": [0, 0, 0, 1, 1, 0]}
    sizes = {kind: [2**30 * size for size in held.get(kind, [0] * 6)] for kind in t.MEMORY_KINDS}
    return t.MemoryUse([0.0, 1.0, 2.0, 3.0, 9.0, 10.0], sizes, 6 * 2**30, 2.0, backward_ms=2.0, optimizer_ms=9.0)


def only():
    """The recorded run as `--only 2,3` would have left it."""
    made = recorded()
    rest = {"status": "not run", "reason": "left out by --only"}
    made.steps = [row if row.step[0] in "23" else r.Row(row.step, row.source, **rest) for row in made.steps]
    return made


def two_gpus():
    """A recorded run of two rows on two GPUs."""
    return read_run(ROOT / "docs" / "results" / "h200-x2" / "slice-scaling" / "2-ddp" / "results.json")


def busy():
    """The recorded run on a machine that did other work beside its second row."""
    made = recorded()
    for k, row in enumerate([*made.steps, *made.peers]):
        row.reference_ms, row.repetitions = reference(20.0, 8.0 if k == 1 else 4.0, 1800.0), []
    return made


def recorded_cpu():
    return read_run(ROOT / "docs" / "results" / "epyc-2-cores" / "tiny" / "results.json")


def partial():
    """Every way to end, no profile but one, no roofs."""
    ended = [step(f"{k}_x", status=s, reason=f"why {k}_x has no time") for k, s in enumerate(r.STATUSES[1:], 1)]
    return run(step("0_a", 300.0, profile=profile(300.0)), *ended)


def cpu():
    no_gpu = dict.fromkeys(("bound_by", "shares", "gpu_idle_ms", "gpu_busy_ms"))
    memory = {"peak_allocated_bytes": None, "peak_rss_bytes": 2**30}
    rows = [step(f"{k}_x", ms, profile=profile(ms, **no_gpu), **memory) for k, ms in enumerate((300, 290, 90))]
    return run(*rows, device="some processor", device_type="cpu")


def full():
    """A run that leaves no kind of text and no dict empty."""
    more = {"note": "x", "settings": r.Settings(*["x"] * 3, True, None, "x", "x", "x"), "heldout_loss": 3.0,
            "gpu_state": r.GpuState(throttle_reasons="x"), "bytes_per_step": r.LeastBytes(9),
            "reference_ms": reference(21.0), "energy_j_per_step": 60.0, "tokens_per_joule": 30.0, "clock_mhz": 1800.0,
            "power_w": 600.0}  # fmt: skip
    half = [t.Launch("x", "x", 0.0, 1.0)]
    more |= {"memory": memory_use(), "predicted_ms": 90.0}
    rows = [repeated(name, ms, ms, profile=profile(ms, block=t.Block(half, 1.0, half, 1.0)), **more)
            for name, ms in (("0", 300.0), ("1", 100.0))]  # fmt: skip
    texts = ("cpu", "os", "python", "triton", "transformer_engine", "cuda", "driver", "nvml_reason", "commit_reason")
    environment = dict.fromkeys(texts, "x") | {"variables": {"x": "x"}}
    made = run(*rows, step("2", status="failed", reason="x"), peers=[step("p")], roofs=ROOFS, **environment)
    return replace(made, problems=["x"])


def hostile(text=HOSTILE["escapes"]):
    """What is read of a run with `text` in all that is text, keys of free dicts included."""

    def soil(value, name=""):
        if isinstance(value, dict):
            free = name in ("variables", "shares", "ceilings", "conditions", "bytes")
            names = {key: text if free and key not in ("memory", "fp8") else key for key in value}
            return {names[key]: soil(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [soil(item, name) for item in value]
        if name == "step":
            return f"{value}{text}"
        return text if isinstance(value, str) and name != "status" else value

    path = scratch[-1] / "results.json"
    write_json(path, soil(asdict(full())))
    return read_run(path)


def write(made, folder):
    """A run as a folder that holds nothing but the merge."""
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder / "results.json", made)
    return folder


def write_rows(folder, *rows, **fields):
    """A record per row, as the scripts write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        write_run(folder / f"{row.step}.json", run(row, **fields))
    return folder


def write_plan(folder, *names, left_out=(), **fields):
    plan = r.Plan("./run_all.sh", [], list(names), list(left_out), workload=WORKLOAD, **fields)
    write_json(folder / "plan.json", asdict(plan) | {"schema_version": 2})


def write_odd(path, made, raw, *keys):
    """A record in which the field at `keys` holds the JSON text `raw`."""
    content = asdict(made)
    reduce(getitem, keys[:-1], content)[keys[-1]] = "@@"
    path.write_text(json.dumps(content).replace('"@@"', raw))


def report(*words, blocked=(), module="report", **environment):
    """`python -m report`, with some packages as if they were not installed."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in blocked)
    code = f"import sys; {hide}import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace",
                          env=os.environ | environment, timeout=120)  # fmt: skip

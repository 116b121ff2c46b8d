"""A small factory of records: rows, runs and run folders whose figures can be computed in the head."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import record as r  # noqa: E402
from common.record import Kernel, Settings, write_json  # noqa: E402

HOSTILE = "\x1b[31m\u202e<script>alert(1)</script>|[x](javascript:alert(1))\n# `x`\x07"
STEPS = ("0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_transformer_engine")
HALF = {"amp_dtype": "bfloat16", "float32_matmul_precision": "high"}
SETTINGS = {
    "0_baseline": Settings("float32", "highest", "by hand", False, False, "AdamW, foreach"),
    "1_cublas": Settings(**HALF, attention_kernel="by hand", compiled=False, captured=False),
    "2_sdpa": Settings(**HALF, attention_kernel="cudnn", compiled=False, captured=False),
    "3_compile": Settings(**HALF, attention_kernel="cudnn", compiled=True, captured=True),
}
SETTINGS["4_transformer_engine"] = Settings(
    **HALF, attention_kernel="cudnn", compiled=True, captured=True, fp8_recipe="x", head="FP8"
)
LEARNED = [4.0, *[3.0] * 4, *[2.0] * 5]


def workload(**fields):
    known = {"preset": "tiny", "n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 1024, "vocab_size": 256}
    known |= {"batch_size": 2, "parameters": 600_000, "tokens_per_step": 2048, "flops_per_step": 8 * 10**12}
    known |= {"seed": 1, "lr": 0.001, "warmup": 1, "steps": 10}
    return r.Workload(**(known | {"text": "text", "text_sha256": "0"} | fields))


def row(step, ms=100.0, status="ok", **fields):
    """Its loss learns, its times hold still, its source is the step's name."""
    if status != "ok":
        return r.Row(step, status, **fields)
    known = {
        "step_ms": [0.999 * ms, ms, 1.001 * ms],
        "warmup_s": 1.5,
        "loss": LEARNED,
        "peak_bytes": 3 * 2**30,
    }
    known |= {
        "settings": SETTINGS.get(step, Settings()),
        "source": f'"""Step {step[0]}: why."""\n\nx = "{step}"\n',
    }
    return r.Row(step, "ok", **(known | fields))


def profile(ms):
    """70 % matrix products, 20 % attention, 5 % copies, 5 % gaps."""
    parts = {"matrix products": 0.7, "attention": 0.2, "copies and casts": 0.05}
    kernels = [
        Kernel("nvjet_sm90_tst_128x256_x", "matrix products", 0.7 * ms, 12),
        Kernel("odd<1>", "other", 0.1, 1),
    ]
    half = [
        Kernel("nvjet_sm90_tst_128x256_x", "matrix products", 2.0, 1, 0.0),
        Kernel("x", "attention", 1.0, 1, 2.0),
    ]
    return r.Profile(
        0.05 * ms, {name: part * ms for name, part in parts.items()}, kernels, 36, 0.0, half, half
    )


def roofs():
    """Products at 100 TFLOP/s in FP32 and 1000 in BF16."""
    rates = (("fp32", 1e14), ("bf16", 1e15))
    return r.Roofs(4e12, [r.ProductRate(name, 64, 64, 64, 2, rate, 0.9 * rate) for name, rate in rates])


def run(*rows, peers=(), work=None, measured=None, problems=(), **environment):
    known = {"device": "GPU", "device_type": "cuda", "versions": {"torch": "2.x"}, "commit": "abcdef012"}
    known |= {"compute_capability": (9, 0)} if environment.get("device_type") != "cpu" else {}
    machine = r.Environment(**(known | environment))
    return r.Run(
        "./run_all.sh", "2026-01-01", machine, work or workload(), [*rows], [*peers], measured, [*problems]
    )


def ladder(*ms, **fields):
    """The first steps with these times, profiled."""
    return run(*(row(step, t, profile=profile(t)) for step, t in zip(STEPS, ms, strict=False)), **fields)


def printed(record):
    """What a terminal shows of a record, its report.md and its page."""
    from report import printers, sections

    report = sections.of(record)
    return printers.terminal(report, []), printers.markdown(report), printers.html(report)


def study(kind, runs):
    return r.Study(kind, "./run_all.sh", "2026-01-01", runs)


def write(folder, record):
    """A recorded run or study: a folder with nothing but the merge."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", record)
    return folder


def plan(folder, *rows, kind="ladder"):
    """A run folder with a plan and no records. A row is its script's name, and its output where that
    differs."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(one, f"{one}.json") if isinstance(one, str) else one for one in rows]
    planned = [{"script": f"{name}.py", "output": output} for name, output in pairs]
    made = {"kind": kind, "command": "./run_all.sh", "started_at": "2026-01-01", "workload": None}
    write_json(folder / "plan.json", made | {"rows": planned, "schema_version": r.SCHEMA_VERSION})
    return folder


def put(folder, made, output=None, **fields):
    """The record of one row, as its script leaves it."""
    path = folder / (output or f"{made.step}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, run(made, **fields))

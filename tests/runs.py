"""Runs to make reports of: the recorded one, one with every way to end, one of a CPU, one by a hostile hand."""

import json

from conftest import ROOT

from common.record import empty_step_record, read_envelope

RECORDED = ROOT / "docs" / "results" / "h200" / "gpt3-6.7b-slice" / "results.json"
WORKLOAD = {
    "preset": "tiny", "n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 1024, "vocab_size": 256, "batch_size": 2,
    "parameters": 600_000, "tokens_per_step": 2048, "flops_per_step": 8_400_000_000,
    "data": {"name": "text", "tokens": 10_000, "batches_sha256": "0"}, "seed": 1, "lr": 0.001, "warmup": 1, "steps": 3,
}  # fmt: skip
TAG = "<script>alert(1)</script>"


def step(name, ms=100.0, status="ok", **fields):
    record = empty_step_record(name, "source\n") | {"status": status}
    if status == "ok":
        timing = {"warmup_s": 1.0, "step_ms": [ms, ms * 0.99, ms * 1.01], "median_ms": ms}
        record |= {"timing": timing | {"p25_ms": ms * 0.995, "p75_ms": ms * 1.005}}
        record |= {"tokens_per_s": 2048 / ms * 1e3, "model_flops_per_s": 8.4e9 / ms * 1e3}
        record |= {"loss": [4.0, 3.0, 2.0, 1.0 + ms / 1e4], "peak_allocated_bytes": 3 * 2**30}
    return record | fields


def profile(ms, names=("gemm", "softmax"), categories=("matrix products", "attention"), bound_by="compute"):
    each = ms / len(names)
    return {
        "step_ms": ms, "steps": 3, "gpu_busy_ms": ms, "gpu_idle_ms": 0.0, "kernels_per_step": len(names),
        "host_syncs": 0, "autograd_nodes_attention": 30, "bound_by": bound_by,
        "shares": {"compute": 0.6, "memory": 0.4, "launch": 0.0},
        "categories": {category: {"ms": each, "launches": 1} for category in categories},
        "kernels": [
            {"name": n, "category": c, "ms": each, "launches": 1} for n, c in zip(names, categories, strict=True)
        ],
    }  # fmt: skip


def run(*steps, peers=(), roofs=None, workload=WORKLOAD, **environment):
    environment = {
        "device": "GPU",
        "device_type": "cuda",
        "torch": "2.x",
        "commit": "abc",
        "dirty": False,
    } | environment
    return {
        "schema_version": 1, "command": "./run_all.sh", "started_at": "2026-01-01", "environment": environment,
        "workload": workload, "roofs": roofs, "steps": list(steps), "peers": list(peers), "problems": [],
    }  # fmt: skip


def recorded():
    return read_envelope(RECORDED)


def partial():
    """Every way to end, no profile but one, no roofs."""
    endings = [("1_b", "oom"), ("2_c", "failed"), ("3_d", "timeout"), ("4_e", "skipped")]
    ended = [step(name, status=status, reason=f"why {name} has no time") for name, status in endings]
    return run(step("0_a", 300.0, profile=profile(300.0)), *ended)


def cpu():
    rows = [
        step(name, ms, profile=profile(ms, bound_by=None)) for name, ms in (("0_a", 300), ("1_b", 290), ("2_c", 90))
    ]
    for row in rows:
        row["peak_allocated_bytes"], row["peak_rss_bytes"] = None, 2**30
        row["profile"] |= {"shares": None, "gpu_idle_ms": None, "gpu_busy_ms": None}
    return run(*rows, device="some processor", device_type="cpu")


def hostile():
    """Tags in everything that a record names."""
    bad = {
        "source": f"x = 1  # {TAG}\n", "note": TAG, "settings": {TAG: TAG},
        "gpu_state": {"throttle_reasons": TAG, "sm_clock_mhz": TAG},
    }  # fmt: skip
    rows = [
        step(f"0_{TAG}", 300.0, profile=profile(300.0, (TAG, "b")), **bad),
        step(
            f"1_{TAG}",
            100.0,
            profile=profile(100.0, (f"{TAG}2", "b")),
            **bad,
            bytes_per_step={"value": 9, "source": TAG},
        ),
        step(f"2_{TAG}", status="failed", reason=TAG),
    ]
    workload = WORKLOAD | {"preset": TAG, "data": {"name": TAG}}
    made = run(*rows, peers=[step(f"p_{TAG}", 50.0)], workload=workload, device=TAG, variables={TAG: TAG}, commit=TAG)
    roofs = {"copy_bytes_per_s": 1e12, "bf16_flops_per_s": 1e15, "notes": [TAG]}
    return made | {"command": TAG, "problems": [TAG], "roofs": roofs}


RUNS = {"recorded": recorded, "partial": partial, "cpu": cpu, "hostile": hostile}


def write(made, folder):
    """The envelope as a run folder that holds nothing but the merge."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(made))
    return folder

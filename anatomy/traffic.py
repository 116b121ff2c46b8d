"""How many bytes go through DRAM: of attention by hand and fused, or of the longest kernels of each step?

    python -m anatomy.traffic [--shape B H T D] [--output FILE]
    python -m anatomy.traffic --scripts 0 1 2 3 4 [--output FILE] [ARGUMENT ...]

Nsight Compute (ncu) counts with the GPU's own counters, where it may read them. It counts kernels, but not the copies
that the driver makes. The first form runs attention forward and backward in BF16, beside the least bytes that it must
move, which is arithmetic. There PyTorch's profiler adds the bytes of such copies. The second form runs one launched
training step of each script; the ARGUMENTs are those of a step (--preset gpt2 --batch-size 8). It divides the bytes of
a kernel by its time, and that by the bandwidth of a copy: a kernel near 100 % is memory-bound.
"""

import argparse
import csv
import datetime
import importlib
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from anatomy.attention_forms import ATTENTIONS, analytic_attention_bytes
from anatomy.experiment import gpu_work
from common import benchmark, data, hardware, roofs
from common.arguments import parse_args
from common.errors import run_command
from common.record import Row, check_writable, write_json
from common.text import OneLineParser, aligned, one_line, portable_command, positive_int, say
from ladder.process import ROOT, module_command

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "second": 1, "s": 1, "msecond": 1e-3, "ms": 1e-3,
         "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9}  # fmt: skip
SCRIPTS = sorted(path.stem for path in ROOT.glob("[0-9]_*.py"))
LIMIT_S = 1200
KERNELS = 10  # of a step, the longest
WARMUP = 3


def count(*worker: str) -> list[dict]:
    """Name, DRAM bytes and seconds of every kernel that this module, run with these words, launches while it profiles.

    Raises OSError where the counters cannot be read.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise OSError("Nsight Compute (ncu) is not installed")
    counting = [ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    counting += ["--metrics", ",".join((READ, WRITTEN, TIME)), *module_command("anatomy.traffic", *worker)]
    done = subprocess.run(counting, capture_output=True, text=True, timeout=LIMIT_S)
    kernels = kernels_of(done.stdout)
    if not kernels:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if "ERR" in line or "rror" in line]
        raise OSError(errors[-1].strip("= ") if errors else f"ncu ended with exit code {done.returncode}, no counters")
    return kernels


def kernels_of(text: str) -> list[dict]:
    """The kernels of ncu's CSV, which has a line for each kernel and metric."""
    kernels: dict[str, dict] = defaultdict(lambda: {"bytes": 0.0, "seconds": 0.0})
    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        if row["Metric Name"] not in (READ, WRITTEN, TIME):
            continue
        value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        kernels[row["ID"]]["name"] = row["Kernel Name"]
        kernels[row["ID"]]["seconds" if row["Metric Name"] == TIME else "bytes"] += value
    return list(kernels.values())


def while_profiled(work: Callable[[], object], device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaProfilerStart()
    work()
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaProfilerStop()


# --- attention ------------------------------------------------------------------------------------


def attention_step(which: str, shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], None]:
    """Forward and backward under BF16 autocast, which have run once to warm up."""
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream_gradient = torch.ones_like(q)

    def forward_backward():
        with torch.autocast(device.type, torch.bfloat16):
            y = ATTENTIONS[which](q, k, v)
        torch.autograd.grad(y, (q, k, v), upstream_gradient)

    forward_backward()
    return forward_backward


def copied_bytes(step: Callable[[], None], device: torch.device) -> int:
    """What the driver's copies within the GPU's memory read and write, by PyTorch's profiler."""
    copies = (event for event in gpu_work(step, device) if "DtoD" in event["name"])
    return 2 * sum(event["args"]["bytes"] for event in copies)


def count_both(shape: tuple[int, int, int, int]) -> tuple[dict[str, dict], str | None]:
    """Form of attention -> bytes by arithmetic, of counted kernels, and of copies; and one line where these could not
    be counted."""
    figures, reason = {}, None
    for which in ATTENTIONS:
        figures[which] = {"analytic": analytic_attention_bytes(which, *shape), "counters": None, "copies": None}
        try:
            kernels = count("--count", which, "--shape", *map(str, shape))
            figures[which]["counters"] = round(sum(kernel["bytes"] for kernel in kernels))
            device = torch.device("cuda")
            figures[which]["copies"] = copied_bytes(attention_step(which, shape, device), device)
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"The DRAM counters could not be read: {one_line(error)}."
    return figures, reason


def traffic_rows(figures: dict[str, dict]) -> list[dict[str, str]]:
    """Rows of a table, from what count_both gives."""
    headers = {"analytic": "least GB", "counters": "counted GB", "copies": "copies GB"}
    return [{"attention": which} | {header: "-" if of_it[key] is None else f"{of_it[key] / 1e9:.2f}"
                                    for key, header in headers.items()}
            for which, of_it in figures.items()]  # fmt: skip


# --- steps of the ladder --------------------------------------------------------------------------


def run_step(script: str, words: list[str]) -> None:
    """One launched step of a script while the profiler counts, after a few that warm up."""

    def profile_one(train_step, model, args, rehearse=None, **_) -> Row:
        model.train()
        drawn = data.read_batches(args.text, args.batch_starts(), args.config.seq_len)
        batches = data.stage_batches(drawn, args.device)
        if rehearse is not None:
            benchmark.rehearsal(train_step, batches[:WARMUP], rehearse)
        for batch in batches[:WARMUP]:
            train_step(*batch)
        while_profiled(lambda: train_step(*batches[WARMUP]), args.device)
        return Row(args.step)

    sys.argv = [f"{script}.py", *words, "--warmup", str(WARMUP), "--steps", "1"]
    module = importlib.import_module(script)
    args = parse_args(ROOT / f"{script}.py", module.__doc__)
    torch.cuda.set_device(args.device)
    benchmark.run = profile_one  # what the script's main calls last
    module.main(args)


def count_step(script: str, words: list[str]) -> dict:
    """Bytes and seconds of a whole step, and of its longest kernels by name; or `reason`, one line."""
    try:
        kernels = count("--count-step", script, *words)
    except (OSError, subprocess.SubprocessError) as error:
        return {"reason": one_line(error)}
    by_name: dict[str, dict] = {}
    for kernel in kernels:
        known = by_name.setdefault(kernel["name"], {"name": kernel["name"], "launches": 0, "bytes": 0, "seconds": 0})
        known |= {key: known[key] + kernel[key] for key in ("bytes", "seconds")} | {"launches": known["launches"] + 1}
    longest = sorted(by_name.values(), key=lambda kernel: -kernel["seconds"])[:KERNELS]
    return {"kernels": longest} | {key: sum(kernel[key] for kernel in kernels) for key in ("bytes", "seconds")}


def step_rows(steps: dict[str, dict], copy_rate: float) -> list[dict[str, str]]:
    return [{
        "step": script, "kernel": kernel["name"][:60], "launches": str(kernel["launches"]),
        "ms": f"{kernel['seconds'] * 1e3:.2f}", "GB": f"{kernel['bytes'] / 1e9:.2f}",
        "of copy": f"{kernel['bytes'] / kernel['seconds'] / copy_rate:.0%}",
    } for script, step in steps.items() for kernel in step.get("kernels", [])]  # fmt: skip


def count_steps(scripts: list[str], words: list[str]) -> dict:
    """The record of the chosen steps. Says its tables, and a line for each step that could not be counted."""
    device = torch.device("cuda")
    steps = {script: count_step(script, words) for script in scripts}
    copy_rate = roofs.copy_rate(device)
    say(aligned(step_rows(steps, copy_rate), n_left=2))
    for script, step in steps.items():
        if "reason" in step:
            say(f"{script} was not counted: {step['reason']}.")
    return {"copy_bytes_per_s": copy_rate, "steps": steps}


# --- command line ---------------------------------------------------------------------------------


def main() -> None:
    parser = OneLineParser(prog="python -m anatomy.traffic", description=__doc__)
    parser.add_argument("--shape", type=positive_int, nargs=4, default=(8, 16, 2048, 128), metavar=("B", "H", "T", "D"))
    parser.add_argument(
        "--scripts", nargs="+", choices=[name[0] for name in SCRIPTS], metavar="N", help="steps: 0 to 4"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")
    for hidden, choices in (("--count", ATTENTIONS), ("--count-step", SCRIPTS)):  # for the process that ncu starts
        parser.add_argument(hidden, choices=choices, help=argparse.SUPPRESS)
    args, words = parser.parse_known_args()
    if args.count:
        device = torch.device("cuda")
        return while_profiled(attention_step(args.count, tuple(args.shape), device), device)
    if args.count_step:
        return run_step(args.count_step, words)
    if words and not args.scripts:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    if args.scripts and not (shutil.which("ncu") and torch.cuda.is_available()):
        parser.error("counting needs Nsight Compute (ncu) and a GPU")
    try:
        if args.output:
            check_writable(args.output, "bytes")
    except ValueError as error:
        parser.error(str(error))
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if args.scripts:
        record = count_steps([name for name in SCRIPTS if name[0] in args.scripts], words)
    else:
        figures, reason = count_both(tuple(args.shape))
        say(aligned(traffic_rows(figures)))
        if reason:
            say(reason)
        record = {"shape": dict(zip("BHTD", args.shape, strict=True)), "bytes": figures, "reason": reason}
    if args.output:
        command = portable_command(["python", "-m", "anatomy.traffic", *sys.argv[1:]])
        environment = hardware.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        of_it = {"command": command, "started_at": started_at, "environment": asdict(environment)}
        write_json(args.output, record | of_it)


if __name__ == "__main__":
    run_command(main, "python -m anatomy.traffic")

"""What a step's arguments mean on this machine, as JSON: it imports torch, and the process of the ladder does
not.

python -m ladder.facts ARGUMENT ...
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from common import flops, hardware
from common.arguments import Arguments, parse_args
from common.text import run_command, say
from ladder.predict import peak_bytes
from ladder.process import ROOT
from ladder.runs import scripts
from ladder.step_kernels import STEPS

CPU_FLOPS_PER_S = 1.5e10  # model FLOPs of one core in FP32 with attention by hand, as recorded for `tiny`
LONG_S = 60  # a step


def main() -> None:
    args = parse_args(ROOT / "run_all.sh", None)
    facts = {
        # The free memory, and with it auto's choice, may change from row to row.
        "pinned": ["--preset", args.preset, "--batch-size", str(args.batch_size)],
        "device_type": args.device.type,
        "device": hardware.device_name(args.device),
        "gpus": torch.cuda.device_count() if args.device.type == "cuda" else 0,
        "workload": asdict(args.workload()),
        "free_bytes": hardware.free_memory_bytes(args.device),
        "needed_bytes": needed_bytes(args),
        "said": told(args),
    }
    say(json.dumps(facts))


def needed_bytes(args: Arguments) -> dict[str, int]:
    """The peak memory of all processes of a row, by script, of those steps that the predictor knows."""
    needed = {}
    for script in scripts():
        step = script.removesuffix(".py")
        if step in STEPS:
            needed[script] = peak_bytes(step, args.config, args.batch_size) * args.processes
    return needed


def told(args: Arguments) -> list[str]:
    """What a user should know before the first row: the device, and what to expect of it."""
    device = f"{hardware.device_name(args.device)}, torch {torch.__version__}"
    if args.device.type == "cuda":
        return [f"GPU: {device}"]
    lines = [f"CPU: {device}. This run shows how each step works, and not what it gains on a GPU"]
    if shutil.which("nvidia-smi") or Path("/dev/dxg").exists():
        lines.append(
            "There seems to be an NVIDIA GPU, but this torch cannot use it: is its driver new enough?"
        )
    step_flops = flops.flops_per_step(args.config, args.batch_size)
    step_s = step_flops / (CPU_FLOPS_PER_S * torch.get_num_threads())
    if step_s > LONG_S:
        step_minutes, row_minutes = step_s / 60, step_s * (args.warmup + args.steps) / 60
        lines.append(
            f"A training step of this shape takes about {step_minutes:.0f} minutes here, "
            f"and a row {row_minutes:,.0f}"
        )
        lines.append("A row ends after 30 minutes (--step-timeout). A smaller shape shows the same")
    return lines


if __name__ == "__main__":
    run_command(main, "run_all.sh")

"""What a step's arguments mean on this machine, as JSON: it imports torch, and the process of the ladder does
not.

python -m ladder.facts --output FILE.json [--roofs] ARGUMENT ...
"""

import sys
import time
from dataclasses import asdict

import torch

from common import flops, hardware
from common.model import GPTConfig
from common.options import CPU_BYTES, Arguments, Measurement, parse_args
from common.record import Workload, write_json
from common.text import progress, run_command
from ladder import roofs
from ladder.process import ROOT
from ladder.rows import LIMIT_S, scripts

LONG_S = 60  # a step


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--roofs"]
    args = parse_args(ROOT / "run_all.sh", None, words)
    # The free memory, and with it auto's choice, may change from row to row.
    pinned = {"--preset": args.preset, "--batch-size": str(args.batch_size)}
    more, messages, step_s = {"needed_bytes": needed_bytes(args)}, [], least_step_s(args)
    if step_s > LONG_S:
        row_s = (args.warmup + args.steps) * step_s
        messages.append(
            f"In FP32 a training step of this shape takes at least {step_s / 60:.1f} minutes here, and a row "
            f"{row_s / 60:,.0f} minutes. A row ends after --step-timeout ({LIMIT_S} s). A smaller shape "
            "shows the same"
        )
    if "--roofs" in sys.argv and args.device.type == "cuda":
        more["roofs"] = asdict(roofs.measure(args))
        progress("")
    write_facts(args, args.workload(), pinned, messages, more)


def write_facts(
    args: Measurement, work: Workload, pinned: dict[str, str], messages: list[str], more: dict
) -> None:
    """Write the facts of a run as a file: what a model prints cannot get in between.

    `pinned` are options that every row gets, `messages` what a user should know before the first row.
    """
    device = args.device
    facts = {
        "pinned": pinned,
        "device_type": device.type,
        "device": hardware.device_name(device),
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
        "workload": asdict(work),
        "free_bytes": hardware.free_memory_bytes(device),
        "messages": [*hardware.about(device), *messages],
    }
    write_json(args.output, facts | more)


def needed_bytes(args: Arguments) -> dict[str, int]:
    """An estimate of the peak memory of all processes of a row in FP32, by script."""
    needed = {}
    for script in scripts():
        by_hand = b"scaled_dot_product_attention" not in (ROOT / script).read_bytes()
        needed[script] = peak_bytes(args.config, args.batch_size, by_hand) * args.processes
    return needed


def peak_bytes(config: GPTConfig, batch_size: int, attention_by_hand: bool) -> int:
    """An estimate of the peak memory of a training step in FP32, launched kernel by kernel: bytes a
    parameter, and what backward finds. In each block that is 16 tensors as large as the residual stream and,
    where attention is written out, its scores; in the last one three times more of these, or else the
    logits."""
    tokens = batch_size * config.seq_len
    scores = config.n_head * config.seq_len if attention_by_hand else 0  # of a token
    saved = tokens * config.n_layer * (64 * config.n_embd + 4 * scores)
    largest = tokens * max(12 * config.vocab_size, 12 * scores)
    return CPU_BYTES * flops.parameters(config) + saved + largest


def least_step_s(args: Arguments, edge: int = 1024) -> float:
    """Seconds that a training step takes on a CPU at least: its FLOPs at the rate of one product in FP32,
    `edge` by `edge`, on all cores. 0 on a GPU."""
    if args.device.type == "cuda":
        return 0.0
    matrix, seconds = torch.randn(edge, edge), []
    for _ in range(4):  # the first also starts the threads
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return flops.flops_per_step(args.config, args.batch_size) * min(seconds) / (2 * edge**3)


if __name__ == "__main__":
    run_command(main, "run_all.sh")

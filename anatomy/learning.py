"""What do a number format and an initialization do to learning?

Predict: the same small GPT trains in FP32, in BF16, and in FP16 with and without scaling of the loss. Which of them
learns less? What is the first loss with GPT-2's initialization, and what with PyTorch's default one?

Prediction. With small initial weights every token of a vocabulary of V is about as likely, so the first loss is ln V.
The gradient of the mean loss of N tokens by a logit is then about 1 / (V N), except for the target. FP16 rounds numbers
below 2^-25 = 3e-8 to zero. So without scaling almost all of these gradients are lost where V N is above 3e7, and almost
none where it is far below. The gradient of the target's logit, about 1 / N, is not lost, so that form still learns,
though less. Scaling multiplies the loss, by 65536 at first, and divides the gradients again in FP32. BF16 has the range
of FP32, so it loses none of them and needs no scaling: its last loss differs from FP32's by no more than those of three
seeds do from each other. The same holds for FP16 with scaling.

PyTorch's default draws embeddings with a standard deviation of 1. The LM head shares this matrix (they are tied), so
the logits are large, the first loss is far above ln V, and the same steps end higher. What enters the first block is
the sum of a token's embedding and a position's, of which LayerNorm makes numbers of size 1. Their product with the
token's own embedding is about C / sqrt(2): so far does this logit lie above a typical one. So the gradient of a typical
logit is exp(-C / sqrt(2)) / N. Below 2^-150 even FP32 rounds it to zero.

Change: --vocab 256. Does FP16 without scaling learn now? --steps 1000: does the default initialization catch up?
Source: Micikevicius et al., Mixed Precision Training (2017); Kalamkar et al., A Study of BFLOAT16 (2019); Radford et
al., GPT-2 (2019), section 2.3.
Run:    python -m anatomy learning [--steps N] [--vocab V] [--layers N] [--dmodel C] [--seq T] [--batch B]
"""

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch

from anatomy.experiment import Check, Refused, Result, size_argument, table
from common import data
from common.hardware import has_bf16_matrix_instructions
from common.model import GPT, GPTConfig

SMALLEST, SMALLEST_FP32 = 2.0**-25, 2.0**-150  # half of a format's smallest number: less than it rounds to zero
LAST = 10  # steps whose mean loss counts as the last loss, or a third of all steps if these are fewer
SEED, LEARNING_RATE = 1337, 1e-3


class Form(NamedTuple):
    dtype: torch.dtype
    scaled: bool = False
    default_initialization: bool = False
    seed: int = SEED


FORMS = {
    "FP32": Form(torch.float32),
    "FP32, another seed": Form(torch.float32, seed=SEED + 1),
    "FP32, a third seed": Form(torch.float32, seed=SEED + 2),
    "BF16": Form(torch.bfloat16),
    "FP16": Form(torch.float16),
    "FP16, loss scaled": Form(torch.float16, scaled=True),
    "FP32, default initialization": Form(torch.float32, default_initialization=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--steps N", "training steps (default: 300 on a GPU, 20 on a CPU, quick 6)")
    size_argument(parser, "--vocab V", "size of the vocabulary, from 256 (default: 50304)")
    size_argument(parser, "--layers N", "blocks (default: 4 on a GPU, 1 on a CPU)")
    size_argument(parser, "--dmodel C", "channels, in heads of 32 (default: 512 on a GPU, 32 on a CPU)")
    size_argument(parser, "--seq T", "tokens of a sequence (default: 512 on a GPU, 128 on a CPU)")
    size_argument(parser, "--batch B", "sequences of a batch (default: 16 on a GPU, 8 on a CPU)")


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    V, T, B = args.vocab or 50304, args.seq or (512 if gpu else 128), args.batch or (16 if gpu else 8)
    C = args.dmodel or (512 if gpu else 32)
    config = GPTConfig(args.layers or (4 if gpu else 1), max(1, C // 32), C, T, max(256, V))
    text, steps = data.standard_library_text(), args.steps or (300 if gpu else 6 if args.quick else 20)
    if data.trained_tokens(text, T) <= T:
        raise Refused(f"--seq {T} is longer than the text, which has {len(text.tokens)} tokens")
    drawn = data.read_batches(text, data.draw_starts(text, steps, B, T, SEED), T)
    batches = data.stage_batches(drawn, args.device)
    trained, rows = {}, []
    for name, form in FORMS.items():
        if gpu and form.dtype is torch.bfloat16 and not has_bf16_matrix_instructions(args.device):
            continue
        trained[name] = found = train(form, config, batches, args.device)
        first, last = (loss if loss is None else f"{loss:.3f}" for loss in (found["losses"][0], found["last"]))
        rows.append({"form": name, "first loss": first, "last loss": last, "skipped steps": len(found["skipped"])})
        rows[-1] |= {"zero gradients of logits, first step": f"{found['zero_share']:.1%}"}
    figures = {"config": vars(config), "tokens": B * T, "steps": steps, "trained": trained}
    title = (
        f"{steps} steps of {B * T} tokens, {config.n_layer} blocks, C {C}, V {config.vocab_size}. Losses in nats; the "
    )
    title += f"last loss is a mean of {min(LAST, math.ceil(steps / 3))} steps"
    found = checks(figures, lambda name, skip=(): train(FORMS[name], config, batches, args.device, skip)["last"])
    return Result([table(title, rows)], sentences(figures), figures, found)


def train(form: Form, config: GPTConfig, batches: list, device: torch.device, skip: Collection[int] = ()) -> dict:
    """The loss of every step, and the mean of the last ones; the share of the first step's gradients of logits that is
    zero; the steps that the scaler skipped because a scaled gradient was infinite. `skip` leaves out these updates.
    """
    step_2 = importlib.import_module("2_sdpa")
    torch.manual_seed(form.seed)
    with device:
        model = GPT(config, step_2.Block, step_2.Head, form.seed)
    if form.default_initialization:
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model.head.lm_head.weight = model.wte.weight
        torch.nn.init.normal_(model.wte.weight)  # the embedding's own default, not that of the head
    zeros = []
    hook = model.head.lm_head.register_full_backward_hook(lambda _, __, out: zeros.append((out[0] == 0).float().mean()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=form.scaled)
    losses, skipped = [], []
    for step, (tokens, targets) in enumerate(batches):
        with torch.autocast(device.type, form.dtype, enabled=form.dtype is not torch.float32):
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        if step not in skip:
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += [step] * (scaler.get_scale() < scale)  # it halves the scale after a step that it skips
        optimizer.zero_grad()
        losses.append(loss.detach())
        hook.remove()  # the first gradients are enough
    losses = [loss.item() for loss in losses]
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    last = statistics.fmean(losses[-min(LAST, math.ceil(len(losses) / 3)) :])
    found = {"losses": finite, "last": last if math.isfinite(last) else None, "skipped": skipped}
    return found | {"zero_share": zeros[0].item()}


def checks(figures: dict, train_again: Callable[..., float | None]) -> list[Check]:
    """`train_again` takes the name of a form, and steps to skip, and returns the last loss."""
    trained, V = figures["trained"], figures["config"]["vocab_size"]
    lost = 1 if 1 / (V * figures["tokens"]) < SMALLEST else 0
    found = [Check("first loss with GPT-2's initialization", math.log(V), trained["FP32"]["losses"][0], "nats")]
    saturated = math.exp(-figures["config"]["n_embd"] / math.sqrt(2)) / figures["tokens"] < SMALLEST_FP32
    forms = ("FP16", lost), ("FP16, loss scaled", 0), ("BF16", 0), ("FP32, default initialization", float(saturated))
    for name, share in forms:
        if name in trained:
            found.append(Check(f"share of lost gradients, {name}", share, round(trained[name]["zero_share"], 2), ""))
    seeds = [trained[name]["last"] for name in FORMS if name == "FP32" or name.endswith(" seed")]
    for name in ("BF16", "FP16, loss scaled"):
        if trained.get(name, {}).get("last"):
            apart, what = (
                abs(trained[name]["last"] - trained["FP32"]["last"]),
                f"distance of the last loss, {name} to FP32",
            )
            find = partial(cause_of_end, name=name, first=trained[name], train_again=train_again)
            found.append(Check(what, max(seeds) - min(seeds), apart, "nats", at_most=True, find_cause=find))
    plain, default = trained["FP32"]["last"], trained["FP32, default initialization"]["last"]
    if default:
        found.append(Check("last loss, below that of the default initialization", default, plain, "nats", at_most=True))
    return found


def cause_of_end(check: Check, name: str, first: dict, train_again: Callable[..., float | None]) -> str | None:
    """Why a form ends further from FP32 than seeds do from each other: FP32 without the steps that its scaler skipped
    ends near it; or it does not repeat itself, because a GPU adds up gradients in an order that changes."""
    if skipped := first["skipped"]:
        last = train_again("FP32", skipped)
        if last is not None and (apart := abs(last - first["last"])) <= check.predicted:
            steps = f"steps {', '.join(map(str, skipped))}"
            return f"the scaler skipped {steps}: FP32 without these ends {apart:.4f} from it"
    last = train_again(name)
    if last is None or (moved := abs(last - first["last"])) < check.measured - check.predicted:
        return None
    return f"trained again from the same seed it ends {moved:.4f} from its first end: it does not repeat itself"


def sentences(figures: dict) -> list[str]:
    trained = figures["trained"]
    reference = trained["FP32"]["last"]
    ends = [f"{name} {row['last'] - reference:+.3f}" if row["last"] else f"{name} is not a number"
            for name, row in trained.items() if name != "FP32"]  # fmt: skip
    first = trained["FP32, default initialization"]["losses"][0]
    return [
        f"The last loss against FP32's, in nats: {', '.join(ends)}.",
        f"The first loss is {trained['FP32']['losses'][0]:.2f} with GPT-2's initialization "
        + (f"and {first:.2f} with the default one." if first else "and no number with the default one."),
    ]

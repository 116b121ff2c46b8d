"""What do a number format and an initialization do to learning?

Prediction. With small initial weights every token of a vocabulary of V is about as likely: the first loss is
ln V. The gradient of the mean loss of N tokens by a logit is about 1 / (V N), except for the target. FP16
rounds numbers below 2^-25 = 3e-8 to zero: without scaling almost all of these are lost where V N is above
3e7. That of the target's logit, about 1 / N, is not, so this form still learns, though less. Scaling
multiplies the loss, by 65536 at first, and divides the gradients in FP32. BF16 has FP32's range. So both end
no further from FP32's loss than two other seeds do.

PyTorch's default draws embeddings with a standard deviation of 1. The head shares them, so the first loss is
far above ln V, and the last one is higher. The logit of the token itself lies about C / sqrt(2) above a
typical one, whose gradient is then exp(-C / sqrt(2)) / N. FP32 rounds that to zero below 2^-150.

Change: --vocab 256. Does FP16 without scaling learn now?
Source: Micikevicius et al., Mixed Precision Training (2017); Radford et al., GPT-2 (2019), section 2.3.
"""

import importlib
import math
import statistics

import torch

from common import data
from common.model import GPT, GPTConfig
from common.text import progress

FORMS = {
    "FP32": {},
    "FP32, another seed": {"seed": 1338},
    "FP32, a third seed": {"seed": 1339},
    "FP32, default initialization": {"default": True},
    "BF16": {"dtype": torch.bfloat16},
    "FP16": {"dtype": torch.float16},
    "FP16, loss scaled": {"dtype": torch.float16, "scaled": True},
}


def train(config, batches, device, dtype=torch.float32, scaled=False, default=False, seed=1337):
    """The loss of every step, and the share of the first step's gradients of logits that is zero."""
    step_2, zeros, losses = importlib.import_module("2_sdpa"), [], []
    torch.manual_seed(seed)
    with device:
        model = GPT(config, step_2.Block, step_2.Head, seed)
    if default:
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        # The embedding's own default; the head, which shares it, has another.
        torch.nn.init.normal_(model.wte.weight)
    hook = model.head.lm_head.register_full_backward_hook(
        lambda _, __, out: zeros.append((out[0] == 0).float().mean())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    for tokens, targets in batches:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        hook.remove()  # the first gradients are enough
    return [loss.item() for loss in losses], zeros[0].item()


def run(lab, steps=None, vocab=None):
    steps, V, B = steps or lab.pick(2, 20, 100), vocab or 50304, lab.pick(6, 8, 8)
    if V < 256:
        raise ValueError(f"--vocab {V} is less than 256: the text is bytes")
    layers, C, T = lab.pick(1, 1, 4), lab.pick(32, 32, 512), lab.pick(128, 128, 512)
    config, text = GPTConfig(layers, C // 32, C, T, V), data.load_text(None, T, V)
    batches = data.stage_batches(text, data.draw_starts(text, steps, B, T, 1337), T, lab.device)
    first, last, lost = {}, {}, {}
    for name, form in FORMS.items():
        progress(name)
        losses, lost[name] = train(config, batches, lab.device, **form)
        first[name], last[name] = losses[0], statistics.fmean(losses[-max(1, min(10, steps // 3)) :])
    plain, default = last["FP32"], last["FP32, default initialization"]
    lab.title = f"{steps} steps of {B * T} tokens, {layers} blocks, C {C}, V {V}; losses in nats"
    lab.row("first loss", first["FP32"], math.log(V), "")
    lab.row("first loss, default initialization", first["FP32, default initialization"], None, "")
    saturated = math.exp(-C / math.sqrt(2)) / (B * T) < 2.0**-150
    shares = {
        "FP16": V * B * T > 2**25,
        "FP16, loss scaled": 0,
        "BF16": 0,
        "FP32, default initialization": saturated,
    }
    for name, share in shares.items():
        lab.row(f"share of lost gradients, {name}", lost[name], float(share), "")
    apart = {name: abs(loss - plain) for name, loss in last.items()}
    seeds = max(apart["FP32, another seed"], apart["FP32, a third seed"])
    for name, bound in (("BF16", seeds), ("FP16, loss scaled", seeds), ("FP16", None)):
        lab.row(f"last loss, {name}: from FP32's", apart[name], bound, "", at_most=bool(bound))
    lab.row("last loss, FP32; predicted: the default initialization's", plain, default, "", at_most=True)
    return f"With PyTorch's default initialization the last loss is {default - plain:.2f} nats higher."

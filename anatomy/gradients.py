"""How far does each number format turn the gradient?

Prediction. A format with m bits behind the point rounds a number by up to 2^-(m+1) of its power of two. Over
numbers of all sizes that is 0.38 x 2^-(m+1) of their length: 0.15 % in BF16, 2.4 % in E4M3, 4.7 % in E5M2.
The gradient of a weight is the product of an input and of a gradient that came from above. So its own matmul
alone turns it by the root of both squares: 0.2 % in BF16; 5.3 % where FP8 is E4M3 forward and E5M2 backward;
3.3 % in E4M3 alone. What came from above is off already, so the measured error is larger.

Measured: a model trains in BF16. Then each format takes the mean gradient of eight batches from the same
weights. Its error is the length of the difference from FP32's, over the length of FP32's. The time is of one
pass forward and backward, replayed as a CUDA graph.

Change: --steps 100. Is a young model's gradient turned less?
Source: Micikevicius et al., FP8 Formats for Deep Learning (2022); Transformer Engine's recipes.
"""

import contextlib
import importlib
import math
from collections.abc import Callable

import torch

from anatomy.lab import main
from common import clock, data
from common.hardware import FP8_CAPABILITY, compute_capability
from common.model import GPT, GPTConfig
from common.text import import_or_skip, one_line, progress

BATCHES, WARM = 8, 20  # of the gradient; passes before it, in which delayed scaling finds its scales
ROUNDING = 0.38  # of the largest error, over numbers that are spread evenly within a power of two
LARGEST = {"BF16": (2**-8, 2**-8), "hybrid": (2**-4, 2**-3), "E4M3": (2**-4, 2**-4)}  # input, gradient
REPLAYS = 20


def recipes() -> dict[str, tuple[str, dict]]:
    """Transformer Engine's, by name: the formats of products, and the arguments of te.autocast."""
    te = importlib.import_module("transformer_engine.common.recipe")
    current, blocks = te.Float8CurrentScaling, te.Float8BlockScaling
    fast = te.MMParams(use_split_accumulator=False)
    fast = current(fp8_gemm_dgrad=fast, fp8_gemm_wgrad=fast)
    return {
        "delayed scaling": ("hybrid", {}),
        "delayed, BF16 head": ("hybrid", {}),
        "delayed, first and last block BF16": ("hybrid", {}),
        "delayed, E4M3 alone": ("E4M3", {"recipe": te.DelayedScaling(fp8_format=te.Format.E4M3)}),
        "current scaling": ("hybrid", {"recipe": current()}),
        "current, BF16 head": ("hybrid", {"recipe": current()}),
        "current, fast accumulation": ("hybrid", {"recipe": fast}),
        "block scaling": ("E4M3", {"recipe": blocks()}),
        "block scaling, BF16 head": ("E4M3", {"recipe": blocks()}),
    }


def train(model: GPT, batches: list, amp: Callable) -> None:
    adamw = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    for k, (tokens, targets) in enumerate(batches):
        with amp():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if k % 100 == 0:
            progress(f"gradients: training, step {k} of {len(batches)}")


def copy_weights(trained: GPT, model: GPT) -> None:
    """Raises ValueError for a model that holds its weights in another order."""
    for other, own in zip(trained.parameters(), model.parameters(), strict=True):
        if own.shape != other.shape:
            raise ValueError("the two models hold their weights in another order")
        own.data.copy_(other.data)


def mean_gradient(model: GPT, batches: list, context: Callable, warm: int = 0) -> torch.Tensor:
    """Over the batches, of all weights, flat; `warm` passes before it are forgotten."""
    for k in range(-warm, len(batches)):
        if k == 0:
            model.zero_grad()
        with context():
            loss = model(*batches[k % len(batches)])
        (loss / len(batches)).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def replay_seconds(model: GPT, batch: tuple, context: Callable, device: torch.device) -> float:
    """Seconds of a pass forward and backward, captured after passes that have compiled all."""
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with context():
            loss = model(*batch)
        loss.backward()
    return clock.mean_seconds(graph.replay, REPLAYS, device)


def keep_in_bf16(te, block: torch.nn.Module) -> None:
    """Let a block of Transformer Engine multiply BF16, whatever is around it."""
    forward = block.forward

    def in_bf16(x):
        with te.autocast(enabled=False):
            return forward(x)

    block.forward = in_bf16


def run(lab, steps=None):
    steps, B = steps or lab.pick(4, 20, 1800), lab.pick(2, 4, 8)
    config = GPTConfig(*lab.pick((1, 2, 32, 32, 256), (2, 2, 64, 64, 256), (12, 12, 768, 1024, 50304)))
    step_2, T = importlib.import_module("2_sdpa"), config.seq_len
    text = data.load_text(None, T, config.vocab_size)
    batches = data.stage_batches(text, data.draw_starts(text, steps + BATCHES, B, T, 1337), T, lab.device)

    def build(block, head, residual_dtype=torch.bfloat16) -> GPT:
        with lab.device:
            return GPT(config, block, head, 1337, residual_dtype)

    def amp():
        return torch.autocast(lab.device.type, torch.bfloat16)

    trained = build(step_2.Block, step_2.Head, torch.float32)
    train(trained, batches[:-BATCHES], amp)
    batches = batches[-BATCHES:]
    exact = mean_gradient(trained, batches, contextlib.nullcontext)

    def measure(name, formats, model, context, warm=0) -> float:
        """Adds the row of a format; its error."""
        progress(f"gradients: {name}")
        copy_weights(trained, model)
        gradient = mean_gradient(model, batches, context, warm)
        error = ((gradient - exact).norm() / exact.norm()).item()
        ms = 1e3 * replay_seconds(model, batches[0], context, lab.device) if lab.gpu else None
        predicted = ROUNDING * math.hypot(*LARGEST[formats])
        lab.row(name, error, predicted, "", **{"forward and backward": f"{ms:.1f} ms" if ms else "-"})
        return error

    lab.title = f"Error of the gradient after {steps} training steps, {config.n_embd} channels"
    in_bf16 = build(step_2.Block, step_2.Head)
    for part in (*in_bf16.blocks, in_bf16.head) if lab.gpu else ():  # as step 3 does
        part.compile()
    errors = {"BF16": measure("BF16", "BF16", in_bf16, amp)}
    if compute_capability(lab.device) < FP8_CAPABILITY:
        lab.row("FP8", "needs a GPU of the generation Ada, Hopper or newer")
        return f"BF16 turns the gradient by {errors['BF16']:.2%}."
    te, step_4 = import_or_skip("transformer_engine.pytorch"), importlib.import_module("4_transformer_engine")
    for name, (formats, how) in recipes().items():
        model = build(step_4.Block, step_2.Head if "BF16 head" in name else step_4.Head)
        if "BF16 head" in name:
            model.head.compile()
        for block in (model.blocks[0], model.blocks[-1]) if "first and last" in name else ():
            keep_in_bf16(te, block)

        @contextlib.contextmanager
        def fp8(how=how):
            with amp(), te.autocast(**how):
                yield

        try:
            errors[name] = measure(name, formats, model, fp8, WARM)
        except (RuntimeError, AssertionError) as error:  # a recipe that this GPU lacks
            lab.row(name, one_line(error, 80))
    least = min(errors.keys() - {"BF16"}, key=errors.get)
    default = errors["delayed scaling"]
    return (
        f"Step 4's FP8 turns the gradient by {default:.1%}, and {least}, the least, by {errors[least]:.1%}."
    )


if __name__ == "__main__":
    main(run)

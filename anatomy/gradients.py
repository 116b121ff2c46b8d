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
from typing import NamedTuple

import torch

from common import clock, data
from common.hardware import FP8_CAPABILITY, compute_capability
from common.model import GPT, GPTConfig
from common.text import import_or_skip, one_line, progress

BATCHES, WARM = 8, 20  # of the gradient; passes before it, in which delayed scaling finds its scales
ROUNDING = 0.38  # of the largest error, over numbers that are spread evenly within a power of two
LARGEST = {"BF16": (2**-8, 2**-8), "hybrid": (2**-4, 2**-3), "E4M3": (2**-4, 2**-4)}  # input, gradient
REPLAYS, SEED = 20, 1337


class Recipe(NamedTuple):
    formats: str  # of products: a key of LARGEST
    recipe: object  # of Transformer Engine
    bf16_head: bool = False
    bf16_ends: bool = False  # the first and the last block


def recipes() -> dict[str, Recipe]:
    te = importlib.import_module("transformer_engine.common.recipe")
    delayed, current, blocks = te.DelayedScaling, te.Float8CurrentScaling, te.Float8BlockScaling
    fast = te.MMParams(use_split_accumulator=False)
    return {
        "delayed scaling": Recipe("hybrid", delayed()),
        "delayed, BF16 head": Recipe("hybrid", delayed(), bf16_head=True),
        "delayed, first and last block BF16": Recipe("hybrid", delayed(), bf16_ends=True),
        "delayed, E4M3 alone": Recipe("E4M3", delayed(fp8_format=te.Format.E4M3)),
        "current scaling": Recipe("hybrid", current()),
        "current, BF16 head": Recipe("hybrid", current(), bf16_head=True),
        "current, fast accumulation": Recipe("hybrid", current(fp8_gemm_dgrad=fast, fp8_gemm_wgrad=fast)),
        "block scaling": Recipe("E4M3", blocks()),
        "block scaling, BF16 head": Recipe("E4M3", blocks(), bf16_head=True),
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


class Trained:
    """A model after `steps` of training in BF16, the batches of a gradient, and that gradient in FP32."""

    def __init__(self, lab, steps: int):
        self.lab, self.device = lab, lab.device
        shape = lab.pick((1, 2, 32, 32, 256), (2, 2, 64, 64, 256), (12, 12, 768, 1024, 50304))
        self.config, self.step_2 = GPTConfig(*shape), importlib.import_module("2_sdpa")
        B, T = lab.pick(2, 4, 8), self.config.seq_len
        text = data.load_text(None, T, self.config.vocab_size)
        starts = data.draw_starts(text, steps + BATCHES, B, T, SEED)
        batches = data.stage_batches(text, starts, T, self.device)
        self.model = self.build(self.step_2.Block, self.step_2.Head, torch.float32)
        train(self.model, batches[:-BATCHES], self.amp)
        self.batches = batches[-BATCHES:]
        self.exact = mean_gradient(self.model, self.batches, contextlib.nullcontext)
        lab.title = f"Error of the gradient after {steps} training steps, {self.config.n_embd} channels"

    def build(self, block, head, residual_dtype=torch.bfloat16) -> GPT:
        with self.device:
            return GPT(self.config, block, head, SEED, residual_dtype)

    def amp(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def measure(self, name: str, formats: str, model: GPT, context: Callable, warm: int = 0) -> float:
        """Adds the row of a format; returns its error."""
        progress(f"gradients: {name}")
        copy_weights(self.model, model)
        gradient = mean_gradient(model, self.batches, context, warm)
        error = ((gradient - self.exact).norm() / self.exact.norm()).item()
        time = "-"
        if self.lab.gpu:
            time = f"{1e3 * replay_seconds(model, self.batches[0], context, self.device):.1f} ms"
        predicted = ROUNDING * math.hypot(*LARGEST[formats])
        self.lab.row(name, error, predicted, "", **{"forward and backward": time})
        return error

    def in_bf16(self) -> GPT:
        """The model of step 3."""
        model = self.build(self.step_2.Block, self.step_2.Head)
        for part in (*model.blocks, model.head) if self.lab.gpu else ():
            part.compile()
        return model

    def in_fp8(self, te, recipe: Recipe) -> GPT:
        """The model of step 4, with what a recipe leaves in BF16."""
        step_4 = importlib.import_module("4_transformer_engine")
        model = self.build(step_4.Block, self.step_2.Head if recipe.bf16_head else step_4.Head)
        if recipe.bf16_head:
            model.head.compile()
        for block in (model.blocks[0], model.blocks[-1]) if recipe.bf16_ends else ():
            keep_in_bf16(te, block)
        return model


def run(lab, steps=None):
    trained = Trained(lab, steps or lab.pick(4, 20, 1800))
    in_bf16 = trained.measure("BF16", "BF16", trained.in_bf16(), trained.amp)
    if compute_capability(lab.device) < FP8_CAPABILITY:
        lab.row("FP8", "needs a GPU of the generation Ada, Hopper or newer")
        return f"BF16 turns the gradient by {in_bf16:.2%}."
    te, errors = import_or_skip("transformer_engine.pytorch"), {}
    for name, recipe in recipes().items():

        @contextlib.contextmanager
        def fp8(recipe=recipe):
            with trained.amp(), te.autocast(recipe=recipe.recipe):
                yield

        try:
            errors[name] = trained.measure(name, recipe.formats, trained.in_fp8(te, recipe), fp8, WARM)
        except (RuntimeError, AssertionError) as error:  # a recipe that this GPU lacks
            lab.row(name, one_line(error, 80))
    if not errors:
        return f"BF16 turns the gradient by {in_bf16:.2%}, and FP8 did not run."
    name, error = next(iter(errors.items()))
    least = min(errors, key=errors.get)
    best = f"{least}, the least, by {errors[least]:.1%}"
    return f"FP8 by {name} turns the gradient by {error:.1%}, and {best}; BF16 by {in_bf16:.1%}."

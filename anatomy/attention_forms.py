"""Causal attention by hand and fused, the least bytes that either moves, and why either takes longer than predicted;
for several experiments and traffic.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anatomy.experiment import AGAIN, NEAR, Cause, Check, extra_peak_bytes, ms, near, quiet, seconds, us
from anatomy.misses import cause_of_miss
from common import hardware

BACKENDS = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,  # PyTorch falls back to this one, which is not fused
}
CHAIN = 128  # exponentials of one number, so that its bytes do not count
MORE = 4  # times as many heads, which fill the GPU


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as scores, mask, softmax and product; all (B, H, T, D)."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def attention_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """The same function as one fused kernel, which is cuDNN's where that runs; or the one without a mask."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@dataclass(frozen=True)
class Forms:
    """Attention of one shape but for its length; each form runs forward and backward."""

    B: int
    H: int
    D: int
    device: torch.device
    dtype: torch.dtype
    autocast: bool
    iters: int
    copy_rate: float

    def step(self, name: str, T: int, causal: bool = True, heads: int = 1) -> Callable[[], None]:
        shape = (self.B, heads * self.H, T, self.D)
        q, k, v = (torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True) for _ in range(3))
        upstream_gradient = torch.randn_like(q)

        def step() -> None:
            with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
                if name == "by hand":
                    y = attention_by_hand(q, k, v)
                else:
                    with sdpa_kernel(BACKENDS[name]):
                        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            torch.autograd.grad(y, (q, k, v), upstream_gradient)

        return step

    def cause(self, check: Check, name: str, T: int) -> Cause:
        """Why a step took longer than predicted: of a fused kernel its mask may save nothing or its heads be few."""

        def of_fused() -> str | None:
            full_s = seconds(self.step(name, T, causal=False), self.iters)
            if masked := cause_by_mask(check.predicted, check.measured, full_s):
                return masked
            return cause_by_heads(check, seconds(self.step(name, T, heads=MORE), self.iters))

        def of_passes() -> str | None:
            scores = torch.zeros(self.B, self.H, T, T, device=self.device, dtype=self.dtype)
            return cause_by_passes(check, scores, self.copy_rate, self.autocast)

        why = of_passes if name == "by hand" else of_fused
        return cause_of_miss(check, self.step(name, T), self.device, slow_kernels=why)

    def measure(self, name: str, T: int) -> dict:
        """Time and peak memory of one step. Raises RuntimeError where a kernel or memory is missing."""
        with quiet():  # the warnings repeat what the error says
            (step := self.step(name, T))()
            return {"peak_bytes": extra_peak_bytes(step, self.device), "seconds": seconds(step, self.iters)}


def cause_by_mask(predicted_s: float, causal_s: float, full_s: float) -> str | None:
    """Why fused causal attention is slower than predicted, which counts half of the scores, if it takes about as long
    as without a mask, `full_s` seconds."""
    if not near(causal_s, full_s):
        return None
    rest = ", which explains a factor of 2 and not more" if causal_s > 2 * NEAR * predicted_s else ""
    return f"without a mask it takes {ms(full_s)} ms: it saves no time on the scores above the diagonal{rest}"


def cause_by_heads(check: Check, more_s: float) -> str | None:
    """Why a fused kernel is slower than predicted, if `MORE` times as many heads, `more_s` seconds, are not: then so
    few do not fill the GPU."""
    share_s = more_s / MORE
    if near(share_s, check.measured) or not near(share_s, check.predicted):
        return None
    return (
        f"{MORE} times as many heads take {ms(more_s)} ms, {ms(share_s)} for as many as here: so few leave idle parts"
    )


def cause_by_passes(check: Check, scores: torch.Tensor, copy_rate: float, autocast: bool) -> str | None:
    """Why attention by hand is slower than its bytes, if it is by what two of its kernels lose that do not reach the
    bandwidth of a copy, each forward and backward. Overwrites the (B, H, T, T) `scores`."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
    calls: dict[str, tuple[Callable, int]] = {"filling in the mask": (partial(scores.masked_fill_, future, 0), 2)}
    if autocast:
        calls["a cast to FP32"] = (scores.float, 3)
    lost_s, reached = 0.0, []
    for what, (call, passes) in calls.items():
        least_s, alone_s = passes * scores.nbytes / copy_rate, seconds(call, AGAIN)
        lost_s += 2 * (alone_s - least_s)
        reached.append(f"{what} reaches {least_s / alone_s:.0%}")
    if not near(check.predicted + lost_s, check.measured):
        return None
    said = f"alone, {' and '.join(reached)} of a copy's bandwidth"
    return f"{said}, and with what they lose {ms(check.predicted + lost_s)} ms are predicted"


def exponential_rate(device: torch.device) -> float | None:
    """Exponentials per second: on a GPU by a compiled chain of them, whose numbers stay in registers, and on a CPU of
    numbers in its caches. None on a GPU without Triton."""
    if device.type == "cpu":
        numbers = torch.rand(2**16)
        return numbers.numel() / seconds(numbers.exp, AGAIN)
    if not hardware.package_version("triton"):
        return None
    numbers = torch.rand(2**22, device=device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            x = torch.exp2(-x)
        return x

    return CHAIN * numbers.numel() / seconds(partial(torch.compile(chain, dynamic=False), numbers), AGAIN)


def cause_by_exponentials(q: torch.Tensor, roof_s: float) -> str | None:
    """Why fused causal attention, forward only, is above its roof of `roof_s` seconds, if the exponentials of its
    scores, which are no FLOPs, take as long that the prediction misses without them."""
    if (rate := exponential_rate(q.device)) is None:
        return None
    *heads, T, _ = q.shape
    exp_s = math.prod(heads) * T * T / 2 / rate
    said = f"its exponentials, which a roof leaves out, alone take {us(exp_s)} us: {us(roof_s + exp_s)} with its FLOPs"
    return None if near(roof_s + exp_s, roof_s) else said


ATTENTIONS = {"by hand": attention_by_hand, "fused": attention_fused}


def analytic_attention_bytes(
    which: str, B: int, H: int, T: int, D: int, itemsize: int = 2, autocast: bool = True, gpu: bool = True
) -> int:
    """The least bytes of forward and backward: each kernel reads its inputs and writes its output once.

    By hand, a pass moves one (B, H, T, T) tensor of 2-byte numbers; an FP32 tensor counts as two. Under autocast the
    forward passes are: scores 1, scale 2, mask 4 (masked_fill copies first), cast to FP32 3, softmax 4, cast back 3,
    product 1. The backward passes are: products 4, casts 6, softmax 12, mask 4, scale 2. Without autocast there are no
    casts; all numbers have one dtype, and softmax takes 2 passes forward and 6 backward. On a GPU PyTorch's softmax
    first multiplies its gradient and its output in a kernel of its own. A CPU has one kernel for both, with half of
    the passes.
    Fused attention moves q, k, v, o forward and q, k, v, o, do, dq, dk, dv backward. By hand moves these as well.
    """
    head_tensor, score_tensor = itemsize * B * H * T * D, itemsize * B * H * T * T
    passes = (46 if autocast else 26) if gpu else (40 if autocast else 23)
    return 12 * head_tensor + (passes * score_tensor if which == "by hand" else 0)

"""Forward and backward in two forms, plain and with a technique, for `techniques`."""

import argparse
import copy
import importlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from anatomy.attention_forms import attention_by_hand, attention_fused
from common.hardware import has_bf16_matrix_instructions
from common.model import GPTConfig

GRAPHED_LAYERS = 16


def checkpointed(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def convolutions(args: argparse.Namespace, B: int) -> tuple[nn.Module, torch.Tensor]:
    """Two convolutions with BatchNorm and ReLU, and images for them."""
    gpu, how = args.device.type == "cuda", {"device": args.device, "dtype": args.dtype or torch.float32}
    layers = (nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 64), (64, 128)))
    images = torch.randn(4 * B if gpu else 2, 3, *[112 if gpu else 32] * 2, **how)
    return nn.Sequential(*layers).to(**how), images


def cnn_inference(args: argparse.Namespace, B: int) -> tuple[Callable, Callable]:
    plain, images = convolutions(args, B)
    forms = plain.eval(), torch.compile(plain.eval())
    return tuple(torch.no_grad()(partial(form, images)) for form in forms)


def pairs(args: argparse.Namespace, layers: int, B: int, T: int, C: int) -> dict[str, Callable]:
    """Technique -> a function that builds two forms of forward and backward, plain and with it. A GPU uses BF16."""
    device, dtype, gpu = args.device, args.dtype or torch.float32, args.device.type == "cuda"
    bf16 = has_bf16_matrix_instructions(device) and dtype is torch.float32
    config, step_2 = GPTConfig(layers, 1 if C % 64 else C // 64, C, T, 256), importlib.import_module("2_sdpa")
    blocks = nn.Sequential(*(step_2.Block(config) for _ in range(layers))).to(device, dtype)
    x = torch.randn(B, T, C, device=device, dtype=dtype)

    def step(model: Callable, x: torch.Tensor = x, amp: bool = gpu and bf16, parts: int = 1) -> Callable:
        def forward_backward() -> None:
            for part in x.chunk(parts):
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    loss = model(part).float().square().mean() / parts
                loss.backward()  # adds to gradients that exist already

        return forward_backward

    def attention() -> tuple[Callable, Callable]:
        how = {"device": device, "dtype": torch.bfloat16 if gpu and bf16 else dtype, "requires_grad": True}
        q, k, v = (torch.randn(B, config.n_head, T, config.head_dim, **how) for _ in range(3))
        return tuple(step(lambda _, a=a: a(q, k, v)) for a in (attention_by_hand, attention_fused))

    def graphs() -> tuple[Callable, Callable]:
        layers = (layer for _ in range(GRAPHED_LAYERS) for layer in (nn.Linear(64, 64), nn.ReLU()))
        small, few = nn.Sequential(*layers).to(device), torch.randn(64, 64, device=device)
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(small), (few,))
        return step(small, few, amp=False), step(graphed, few, amp=False)

    def layouts() -> tuple[Callable, Callable]:
        plain, images = convolutions(args, B)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        return step(plain, images), step(last, images.contiguous(memory_format=torch.channels_last))

    return {
        "CNN inference under torch.compile": partial(cnn_inference, args, B),
        "torch.compile": lambda: (step(blocks), step(torch.compile(copy.deepcopy(blocks)))),
        "FlashAttention": attention,
        "checkpointing": lambda: (step(blocks), step(partial(checkpointed, blocks))),
        "channels-last": layouts,
        "gradient accumulation": lambda: (step(blocks), step(blocks, parts=4)),
        **({"mixed precision": lambda: (step(blocks, amp=False), step(blocks, amp=True))} if bf16 else {}),
        **({"CUDA graphs": graphs} if gpu else {}),
    }

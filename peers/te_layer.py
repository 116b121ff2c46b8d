"""Peer: te.TransformerLayer used plainly.

Transformer Engine's whole layer with its own fused attention, under FP8 autocast with its default recipe. The head is
BF16 by PyTorch, AdamW is PyTorch's fused one, and torch.compile runs only where the layer itself uses it. The rows of
its q, k and v weight stand in the ladder's order (qkv_weight_interleaved=False), so the initial function is the same.
Scales are rehearsed as in 4_transformer_engine.py. Source: Transformer Engine's "Getting started".

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see README
"""

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import benchmark
from common.errors import Skip
from common.model import GPT

te = benchmark.optional("transformer_engine.pytorch", "transformer-engine[pytorch]")


def main(args):
    args.require_gpu("Transformer Engine")
    available, reason = te.is_fp8_available(return_reason=True)
    if not available:
        raise Skip(f"no FP8: {reason}")
    if args.amp_dtype is not torch.bfloat16:
        raise Skip("this peer multiplies FP8 under BF16 mixed precision only")
    args.require_multiples_of(32 if te.get_default_recipe().mxfp8() else 16, "FP8", vocab=False)
    torch.set_float32_matmul_precision("high")

    def block(config):
        return te.TransformerLayer(
            config.n_embd, 4 * config.n_embd, config.n_head, hidden_dropout=0.0, attention_dropout=0.0,
            self_attn_mask_type="causal", attn_input_format="bshd", fuse_qkv_params=True,
            qkv_weight_interleaved=False,
        )  # fmt: skip

    plain_head = importlib.import_module("2_sdpa").Head
    with args.device:
        model = GPT(args.config, block, plain_head, args.seed, residual_dtype=args.amp_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw, fused=True)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype), te.autocast(enabled=True):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    recipe = repr(te.get_default_recipe())
    return benchmark.run(train_step, model, args, rehearse=optimizer, fp8_recipe=recipe, head="BF16")


if __name__ == "__main__":
    benchmark.launch(main)

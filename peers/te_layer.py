"""Peer: te.TransformerLayer used plainly.

Transformer Engine's whole layer, with its own fused attention, under FP8 autocast with delayed scaling, its default
on Ada and Hopper; the head in BF16 by PyTorch; fused AdamW; torch.compile only where the layer itself uses it. The
rows of its q, k and v weight stand head by head: the ladder's initial numbers make another function of the same kind.
Source: Transformer Engine's "Getting started".

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see README
"""

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import benchmark
from common.model import GPT


def main(args):
    if args.device.type != "cuda":
        raise benchmark.Skip("Transformer Engine needs an NVIDIA GPU")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling
    except Exception as error:  # whatever breaks in it, the row says so
        install = 'pip install --no-build-isolation "transformer-engine[pytorch]"'
        raise benchmark.Skip(f"Transformer Engine does not import ({benchmark.one_line(error)}): {install}") from None
    available, reason = te.is_fp8_available(return_reason=True)
    if not available:
        raise benchmark.Skip(f"no FP8: {reason}")
    if args.amp_dtype is not torch.bfloat16:
        raise benchmark.Skip("this peer multiplies FP8 under BF16 mixed precision only")
    args.require_multiples_of(16, "FP8", vocab=False)
    torch.set_float32_matmul_precision("high")

    def block(config):
        return te.TransformerLayer(
            config.n_embd, 4 * config.n_embd, config.n_head, hidden_dropout=0.0, attention_dropout=0.0,
            self_attn_mask_type="causal", attn_input_format="bshd", fuse_qkv_params=True,
        )  # fmt: skip

    plain_head = importlib.import_module("2_sdpa").Head
    with args.device:
        model = GPT(args.config, block, plain_head, args.seed, residual_dtype=args.amp_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw, fused=True)
    recipe = DelayedScaling()

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype), te.autocast(enabled=True, recipe=recipe):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return benchmark.run(train_step, model, args, fp8_recipe=repr(recipe))


if __name__ == "__main__":
    benchmark.launch(main)

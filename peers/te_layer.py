"""Peer of 4_transformer_engine.py: te.TransformerLayer, used plainly.

Transformer Engine's whole layer with its own fused attention, under FP8 autocast with its default recipe. The head is
step 2's in BF16, its loss is compiled, AdamW is fused and the step is captured, as in step 4. The rows of its q, k and
v weight stand in the ladder's order (qkv_weight_interleaved=False), so the initial function is the same. Source:
Transformer Engine's "Getting started".

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see README
"""

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import cuda_graph
from common.benchmark import launch, optional
from common.model import GPT

te = optional("transformer_engine.pytorch", "transformer-engine[pytorch]")


def block(config):
    return te.TransformerLayer(
        config.n_embd,
        4 * config.n_embd,
        config.n_head,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
    )


def main(args):
    args.require_fp8(head=False)
    torch.set_float32_matmul_precision("high")
    with args.device:
        model = GPT(
            args.config, block, importlib.import_module("3_compile").Head, args.seed, residual_dtype=args.amp_dtype
        )
    model.head.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **args.adamw)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype), te.autocast():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return cuda_graph.capture(train_step, optimizer, args), model


if __name__ == "__main__":
    launch(main)

"""Peer of 4_transformer_engine.py: te.TransformerLayer, used plainly.

Step 4 with Transformer Engine's whole layer and its own fused attention in the place of the blocks, and step 3's head:
BF16, compiled. qkv_weight_interleaved=False keeps the ladder's order of q, k and v. Source: its page "Getting started".

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see docs/not-faster.md
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import launch, optional

te = optional("transformer_engine.pytorch", "transformer-engine[pytorch]")
step, compiled = (importlib.import_module(name) for name in ("4_transformer_engine", "3_compile"))


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


def head(config):
    (part := compiled.Head(config)).compile(fullgraph=True)
    return part


def main(args):
    step.Block, step.Head = block, head
    return step.main(args)


if __name__ == "__main__":
    launch(main)

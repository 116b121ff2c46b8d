"""Peer of 4_transformer_engine.py: te.TransformerLayer for the blocks, as in its "Getting started", and step
3's head.

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see docs/not-faster.md
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import import_or_skip, launch

os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")  # its layer would silently take it where cuDNN does not load
te = import_or_skip("transformer_engine.pytorch", "transformer-engine[pytorch]")
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
        qkv_weight_interleaved=False,  # the ladder's order of q, k and v
    )


def head(config):
    (part := compiled.Head(config)).compile(fullgraph=True)
    return part


def main(args):
    step.Block, step.Head = block, head
    return step.main(args)


if __name__ == "__main__":
    launch(main)

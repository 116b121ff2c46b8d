"""Peer of 4_transformer_engine.py: te.TransformerLayer for the blocks.

They are set up as on the page "Getting started" of its documentation, with the recipe of step 4.
The head is that of 3_compile.py, in BF16.

Run:      python peers/te_layer.py                  Needs: Transformer Engine, see docs/not-faster.md
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import measure
from common.text import import_or_skip

# Where cuDNN does not load, the layer would silently take attention that is not fused.
os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
te = import_or_skip("transformer_engine.pytorch", "transformer-engine[pytorch]")
compiled_step = importlib.import_module("3_compile")
fp8_step = importlib.import_module("4_transformer_engine")


def block(config):
    """Takes the place of a step's Block: attention, MLP and norms in one layer, (B, T, C) to (B, T, C)."""
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
    """Takes the place of step 4's Head: that of step 3, in BF16 and compiled."""
    module = compiled_step.Head(config)
    module.compile(fullgraph=True)
    return module


def main(args):
    """Step 4 with other parts. Returns train_step, model, optimizer and capture, as a step does."""
    fp8_step.Block, fp8_step.Head = block, head
    return fp8_step.main(args)


if __name__ == "__main__":
    measure(main)

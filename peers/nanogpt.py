"""Peer of 3_compile.py: nanoGPT's model, trained as its train.py trains by default.

Its GPT with torch.compile, BF16 autocast and its own fused AdamW groups (weight decay for matrices alone), TF32 for
what stays FP32, launched. The weights begin with its own numbers, from the ladder's seed. Source: model.py and train.py
of karpathy/nanoGPT.

Run:      PYTHONPATH=nanoGPT python peers/nanogpt.py    Needs: git clone the repository of karpathy/nanoGPT
"""

import sys
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import launch, optional
from common.text import Skip

nanogpt = optional("model")


class LossOnly(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return self.model(tokens, targets)[1]


def main(args):
    if not (isinstance(nanogpt, ModuleType) and hasattr(nanogpt, "GPTConfig")):
        raise Skip("nanoGPT's model.py does not import: PYTHONPATH must name a clone of karpathy/nanoGPT")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    shape = args.config
    config = nanogpt.GPTConfig(
        block_size=shape.seq_len,
        vocab_size=shape.vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        dropout=0.0,
        bias=True,
    )
    with args.device:
        model = nanogpt.GPT(config)
    adamw = args.adamw
    optimizer = model.configure_optimizers(adamw["weight_decay"], adamw["lr"], adamw["betas"], args.device.type)
    model = LossOnly(model)
    model.compile()

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return train_step, model


if __name__ == "__main__":
    launch(main)

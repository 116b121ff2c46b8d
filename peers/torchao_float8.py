"""Peer of 4_transformer_engine.py: the compiled step 3 with torchao's float8 training.

A block's four Linear layers are converted by convert_to_float8_training with the tensorwise recipe, which torchao's
documentation of recipe names calls its fastest. The head stays BF16: the example of torchao's page on training leaves
the last layer out. All else is step 3's: blocks compiled, fused AdamW, the step captured. Source: torchao's page
"Training" and torchao.float8.Float8LinearRecipeName.

Run:      python peers/torchao_float8.py            Needs: pip install torchao
"""

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import cuda_graph
from common.benchmark import launch, optional
from common.model import GPT

float8 = optional("torchao.float8", "torchao")


def main(args):
    args.require_fp8(head=False)
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    torch.set_float32_matmul_precision("high")
    step = importlib.import_module("3_compile")
    with args.device:
        model = GPT(args.config, step.Block, step.Head, args.seed, residual_dtype=args.amp_dtype)
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "lm_head" not in name)
    for part in (*model.blocks, model.head):
        part.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **args.adamw)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return cuda_graph.capture(train_step, optimizer, args), model


if __name__ == "__main__":
    launch(main)

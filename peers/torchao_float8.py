"""Peer: the compiled step with torchao's float8 training.

The model of 3_compile.py, its block's four Linear layers converted by convert_to_float8_training with the
tensorwise recipe, which torchao's documentation of recipe names calls its fastest. The head stays BF16: the example of
torchao's page on training leaves the last layer out. PyTorch's fused AdamW, where 3_compile.py compiles its own;
torch.compile over the model. Source: torchao's page "Training" and torchao.float8.Float8LinearRecipeName.

Run:      python peers/torchao_float8.py            Needs: pip install torchao
"""

import importlib
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import benchmark, hardware
from common.errors import Skip
from common.model import GPT

float8 = benchmark.optional("torchao.float8", "torchao")


def main(args):
    args.require_gpu("float8 training")
    if hardware.compute_capability(args.device) < (8, 9):
        raise Skip("float8 training needs an Ada or Hopper GPU or newer")
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    if args.amp_dtype is not torch.bfloat16:
        raise Skip("this peer multiplies FP8 under BF16 mixed precision only")
    args.require_multiples_of(16, "FP8", vocab=False)
    torch.set_float32_matmul_precision("high")
    compiled = importlib.import_module("3_compile")
    with args.device:
        model = GPT(args.config, compiled.Block, compiled.Head, args.seed, residual_dtype=args.amp_dtype)
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "lm_head" not in name)
    model = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw, fused=True)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype), sdpa_kernel(backends, set_priority=True):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return benchmark.run(train_step, model, args, fp8_recipe="torchao tensorwise", head="BF16")


if __name__ == "__main__":
    benchmark.launch(main)

"""Peer of 3_compile.py: GPT-2 of Hugging Face transformers, tuned as its documentation tells.

SDPA attention, torch.compile over model and loss, no dropout; launched, as a Trainer launches it. Autocast
and AdamW are those of 3_compile.py. The residual stream stays FP32. The weights begin with the ladder's
numbers. Source: transformers' pages GPT-2, "GPU" (efficient training) and AttentionInterface.

Run:      python peers/transformers_gpt2.py         Needs: pip install transformers
"""

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import measure
from common.model import GPT
from common.text import import_or_skip

transformers = import_or_skip("transformers", "transformers")
compiled_step = importlib.import_module("3_compile")


class HuggingFaceGPT2(torch.nn.Module):
    """Takes the place of common.model.GPT in 3_compile.py. That script compiles each of `blocks` and then
    `head`: here there are no blocks, and the head is the whole model."""

    blocks = ()

    def __init__(self, config, block, head, seed, residual_dtype):
        super().__init__()
        # Compiled attention by the name "sdpa" gets a mask as a tensor, which is slow. By another name it
        # gets none, and is called with is_causal (huggingface/transformers issue 48925).
        attentions = transformers.AttentionInterface()
        attentions.register("sdpa_without_mask", attentions["sdpa"])
        gpt2_config = transformers.GPT2Config(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            n_positions=config.seq_len,
            vocab_size=config.vocab_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            attn_implementation="sdpa_without_mask",
        )
        self.model = transformers.GPT2LMHeadModel(gpt2_config)
        self.copy_weights(GPT(config, block, head, seed))

    @torch.no_grad()
    def copy_weights(self, ladder_gpt: GPT):
        """Both list the same parameters in the same order. Matrices of Conv1D, named c_*, are transposed."""
        pairs = zip(self.model.named_parameters(), ladder_gpt.parameters(), strict=True)
        for (name, weight), ladder_weight in pairs:
            transposed = ".c_" in name and weight.dim() == 2
            weight.copy_(ladder_weight.T if transposed else ladder_weight)

    @property
    def head(self):
        return self  # so the whole model is compiled

    def forward(self, tokens, targets):
        logits = self.model(tokens).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):
    """Step 3 with another model. Returns train_step, model and optimizer."""
    compiled_step.GPT = HuggingFaceGPT2
    train_step, model, optimizer, _ = compiled_step.main(args)
    return train_step, model, optimizer  # without `capture`: each kernel is launched


if __name__ == "__main__":
    measure(main)

"""Hugging Face's GPT-2, 124 million weights: ./run_all.sh --model examples/gpt2.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

B, T = (16, 1024) if torch.cuda.is_available() else (1, 64)


def model():
    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False))


def batches():
    while True:
        tokens = torch.randint(50257, (B, T))
        yield {"input_ids": tokens, "labels": tokens}

"""What `./run_all.sh --model FILE` changes of a training loop.

The first function is the loop. Each of the others is one change, and imports nothing of this project; a
report shows it as the plain lines of mine/lines.py. Of their arguments, `blocks` are the layers of the model,
`parts` those or the whole model, and `tensors_of` a function that lists the tensors of a batch.
"""

import torch


def training_step(model, loss_of, optimizer, contexts):
    """The loop's body. It returns the loss detached, so that nothing of a step outlives it."""

    def train_step(batch):
        with contexts():  # autocast, FP8: nothing at first
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def mixed_precision(device):
    """Matmuls in BF16 on tensor cores, in `with` around forward and loss; what stays in FP32 is TF32."""
    torch.set_float32_matmul_precision("high")
    return torch.autocast(device.type, torch.bfloat16)


def fused_attention(model, needs_mask):
    """Hugging Face's switch to F.scaled_dot_product_attention."""
    if needs_mask:  # padding, a sliding window, or attention that is not causal
        return model.set_attn_implementation("sdpa")
    # By the name "sdpa", a CUDA graph gets a mask as a tensor, which is slow. By another name it gets none.
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa_without_mask", AttentionInterface()["sdpa"])
    return model.set_attn_implementation("sdpa_without_mask")


def compile_parts(model, parts, loss):
    """Compile blocks, since equal ones compile once, or the whole model. Returns the loss compiled: a
    function of your own, Hugging Face's model.loss_function, or None where the model computes its loss."""
    # A block that reads its own number is compiled once more for each number.
    torch._dynamo.config.recompile_limit = max(8, 2 * len(parts))
    for part in parts:
        if part.forward.__module__.startswith("torch.nn."):  # compile() would leave these as they are
            part.forward = torch.compile(part.forward)
        else:
            part.compile()
    if model not in parts:  # or the loss would compile the whole model with it
        model.forward = torch.compiler.disable(model.forward)
    return loss and torch.compile(loss)


def capture_step(train_step, tensors_of, batch):
    """The whole step as a CUDA graph. The optimizer needs capturable=True. Launch three steps before, all on
    one stream that is not the default one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = train_step(batch)  # recorded, not run: it trains nothing

    def replay(new_batch):
        for place, numbers in zip(tensors_of(batch), tensors_of(new_batch), strict=True):
            place.copy_(numbers)
        graph.replay()
        return loss.clone()  # the next replay overwrites `loss`

    return replay


def fp8_linears(blocks):
    """The nn.Linear layers of the blocks in FP8 by torchao, one scale a tensor. Then compile the blocks."""
    from torchao.float8 import convert_to_float8_training

    def divides(module, name):
        return isinstance(module, torch.nn.Linear) and not any(size % 16 for size in module.weight.shape)

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=divides)

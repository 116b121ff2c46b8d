"""What does fused attention save?

Prediction, for causal attention, forward and backward, of (B, H, T, D) tensors. By hand each operator is a
kernel that reads or writes the (B, H, T, T) scores. Under autocast these are 46 passes over 2-byte numbers:
product 1, scale 2, mask 4, cast to FP32 3, softmax 4, cast back 3, product 1; backward products 4, casts 6,
softmax 12, mask 4, scale 2. In FP32 they are 26 of 4 bytes, on a CPU 23. The products have 12 B H T^2 D
FLOPs.

Fused, the scores stay on the chip: 12 passes over (B, H, T, D), 0.4 GB. The half above the diagonal is
skipped, and the scores are computed again in backward: 7 B H T^2 D FLOPs, and B H T^2 exponentials. An H100
makes 989 T FLOPs a second and 3.9 T exponentials: one counts as 256 FLOPs, in FP32 as 16; on a CPU's cores as
100. Bytes and FLOPs take their number over measured rates. The sum counts, or what the same function takes at
T = 16, where launching is all.

Autograd keeps a node for each operator: 16 by hand, of which a product of 4-D tensors is 6, and 1 fused. By
hand saves q, k, v, the softmax of B H T^2 numbers and the mask of T^2 bytes; fused saves q, k, v, o and B H T
numbers of FP32.

Change: --dim 32. Which of the two terms changes, and by how much?
Source: Dao et al., FlashAttention (2022), section 3; Shah et al., FlashAttention-3 (2024), section 3.2.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anatomy.lab import rate, shown


def by_hand(q, k, v):
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # (B, H, T, T)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forward_backward(attention, shape, dtype, device):
    """A call that runs both, under autocast where numbers have 2 bytes."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def call():
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            y = attention(q, k, v)
        return torch.autograd.grad(y, (q, k, v), gradient)

    return call


def nodes_and_saved_bytes(attention, shape, device):
    """Nodes of the backward graph without its leaves, and the bytes that they save."""
    inputs, saved = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)], {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        todo, nodes = [attention(*inputs).grad_fn], set()
    while todo:
        nodes.add(node := todo.pop())
        todo += [parent for parent, _ in node.next_functions if parent and parent not in nodes]
    return sum("AccumulateGrad" not in node.name() for node in nodes), sum(saved.values())


def run(lab, batch=None, heads=None, dim=None, dtype=None):
    B, H, D = batch or 1, heads or lab.pick(4, 4, 16), dim or lab.pick(64, 64, 128)
    dtype, times = dtype or (torch.bfloat16 if lab.amp else torch.float32), {}
    precision, passes, exponential = "fp32", 26, 16
    if dtype.itemsize == 2:
        precision, passes, exponential = "bf16", 46, 256
    elif not lab.gpu:
        passes, exponential = 23, 100
    forms = {by_hand: (passes, 12 * D), fused: (0, 7 * D + exponential)}  # of each score: passes, FLOPs

    def seconds(form, T):
        return lab.seconds(forward_backward(form, (B, H, T, D), dtype, lab.device))

    short_s = [seconds(form, 16) for form in forms]
    lab.title = f"Forward and backward, B {B}, H {H}, D {D}, {dtype}"
    for T in lab.pick((256, 512), (256, 1024, 2048), (256, 1024, 4096, 8192)):
        for (form, (passes, flops)), launching_s in zip(forms.items(), short_s, strict=True):
            n_bytes, times[form] = dtype.itemsize * B * H * T * (12 * D + passes * T), seconds(form, T)
            work_s = n_bytes / rate("copy", lab.device) + flops * B * H * T * T / rate(precision, lab.device)
            predicted = lab.expected(launching_s, work_s)
            lab.row(f"T {T}, {form.__name__}", times[form], predicted, moved=shown(n_bytes, "B"))
    for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            try:
                lab.row(f"T {T}, fused, by {kernel} alone", seconds(fused, T))
            except RuntimeError:  # no such kernel for this device
                lab.row(f"T {T}, fused, by {kernel} alone", "needs a GPU")
    lab.title = "What autograd keeps of the forward pass, B 2, H 2, D 16, FP32"
    for T in (128, 256):
        saved = (by_hand, 16, 4 * (3 * 64 * T + 4 * T * T) + T * T), (fused, 1, 4 * (4 * 64 * T + 4 * T))
        for form, nodes, n_bytes in saved:
            kept_nodes, kept_bytes = nodes_and_saved_bytes(form, (2, 2, T, 16), lab.device)
            lab.row(f"T {T}, {form.__name__}: nodes", kept_nodes, nodes, "")
            lab.row(f"T {T}, {form.__name__}: saved", kept_bytes, n_bytes, "B")
    ratio = times[by_hand] / times[fused]
    return f"At the longest T attention by hand takes {ratio:.1f} times as long as fused."

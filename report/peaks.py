"""Dense peaks of cards by their datasheets: what MFU, model FLOPs utilization, is held against.

MFU is the rate of model FLOPs, by the convention that the record states, over this peak. The name is of
Chowdhery et al., PaLM (2022). Sources: NVIDIA's datasheets of each card and, of GeForce cards, its
whitepapers "Ada GPU Architecture" and "RTX Blackwell GPU Architecture", at the rates of products that are
summed in FP32. Figures with sparsity are halved. A card that is not here, such as GB10, has none.
"""

import re

PEAKS = {  # TFLOP/s by how a device's name goes on behind NVIDIA; the first that matches
    r"B[23]00": {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500},
    r"GB[23]00": {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000},
    r"H[12]00 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp8": 1670.5},
    r"H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756, "fp8": 1513},
    r"G?H[12]00": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9},  # the SXM form
    r"A100": {"fp32": 19.5, "tf32": 156, "bf16": 312},
    r"A10\b": {"fp32": 31.2, "tf32": 62.5, "bf16": 125},
    r"L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp8": 733},
    r"L4\b": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp8": 242.5},
    r"GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3},
    r"GeForce RTX 5090": {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp8": 419},
}


def peak_flops_per_s(device: str, precision: str) -> float | None:
    """Of one whole card; None for a card or a precision that is not known here."""
    for name, peaks in PEAKS.items():
        if re.match(rf"NVIDIA {name}(?! (?:Laptop|D\b))", device) and "MIG" not in device:  # a part of a card
            peak = peaks.get(precision)
            return peak and peak * 1e12
    return None

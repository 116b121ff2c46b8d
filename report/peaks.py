"""Dense peaks of cards by their datasheets: what MFU, model FLOPs utilization, is held against.

MFU is the rate of model FLOPs, by the convention that the record states, over this peak. Sources: NVIDIA's
datasheets "H200 Tensor Core GPU", "H100 Tensor Core GPU" and "A100 Tensor Core GPU", whose figures with
sparsity are halved. The name MFU is of Chowdhery et al., PaLM (2022).
"""

import re

HOPPER = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}  # TFLOP/s of the SXM form
PEAKS = {  # by what a device's name holds
    r"H200(?! NVL)": HOPPER,
    r"H100(?! (PCIe|NVL))": HOPPER,
    r"A100": {"fp32": 19.5, "tf32": 156, "bf16": 312},
}


def peak_flops_per_s(device: str, precision: str) -> float | None:
    """Of one whole card; None for a card or a precision that is not known here."""
    for name, peaks in PEAKS.items():
        if re.match(rf"NVIDIA {name}", device) and "MIG" not in device:  # a part of a card
            peak = peaks.get(precision)
            return peak and peak * 1e12
    return None

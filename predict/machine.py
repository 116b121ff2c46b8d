"""What a machine would take for products, kernels and attention of any size, from its measured roofs."""

import itertools
import math

import numpy as np

from common import flops
from common.record import ProductRate, Roofs
from ladder.roofs import SQUARE
from predict import roofs
from predict.step_kernels import Pass

COPY = "copy fp32"  # moves 8 bytes a number
ROUNDS = 20  # in which `slowdown` converges


class Machine:
    """Seconds of work on a machine whose roofs were measured."""

    def __init__(self, measured: Roofs):
        self.roofs, self.products = measured, {}
        for p in measured.products:
            self.products[p.precision, p.m, p.n, p.k] = 2 * p.m * p.n * p.k / p.burst_flops_per_s
        self.precisions = {p.precision for p in measured.products}
        on_gpu = any(p.m == p.n == p.k == SQUARE["cuda"] for p in measured.products)
        self.axis = roofs.GRID["cuda" if on_gpu else "cpu"]

    def product_s(self, precision: str, m: int, n: int, k: int) -> float:
        """Of a product at its ceiling: measured, or linear in M, N and K between its neighbours in the grid.

        A product costs a launch, bytes that grow with two dimensions at a time, and FLOPs that grow with all
        three, so its time is linear in each dimension. Beyond the grid it grows with the FLOPs. Raises
        ValueError without a grid.
        """
        if (precision, m, n, k) in self.products:
            return self.products[precision, m, n, k]
        axis, seconds, beyond = self.axis, self._grid(precision), 1.0
        for size in (m, n, k):  # each round takes a dimension away
            beyond *= max(1.0, size / axis[-1])
            size = min(max(size, axis[0] / 2), axis[-1])
            upper = min(max(1, int(np.searchsorted(axis, size))), len(axis) - 1)
            share = (size - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
            seconds = (1 - share) * seconds[upper - 1] + share * seconds[upper]
        return beyond * float(seconds)

    def _grid(self, precision: str) -> np.ndarray:
        """Seconds of the products of the grid, by M, N and K."""
        try:
            sizes = itertools.product(self.axis, repeat=3)
            seconds = [self.products[precision, m, n, k] for m, n, k in sizes]
        except KeyError:
            lack = "the roofs lack products of a size that could not be measured: their notes say why"
            raise ValueError(lack) from None
        n = len(self.axis)
        return np.reshape(seconds, (n, n, n))

    def pass_s(self, kernels: Pass, numbers: float) -> float:
        """Of one kernel of a pass over `numbers` numbers: measured, or the time of a copy of as many
        bytes."""
        timed, size = self._timed(kernels.kernel), numbers
        if not timed:
            timed, size = self._timed(COPY), kernels.bytes / kernels.kernels * numbers / 8
        beyond = max(1.0, size / max(timed))
        return beyond * _between(timed, size / beyond)

    def _timed(self, kernel: str | None) -> dict[int, float]:
        """Seconds of a kernel of predict/roofs.py, by numbers in its tensor."""
        return {numbers: seconds for name, numbers, seconds in self.roofs.kernels if name == kernel}

    def attention_s(self, T: int, D: int, heads: int) -> float:
        """Of fused causal attention, forward and backward, between measured lengths. A head dimension that
        was not measured takes as long as the next larger one: kernels are made for few, and fill up. Raises
        ValueError for one that is larger than all."""
        dims = sorted({dim for _, dim, _ in self.roofs.attention})
        if dims[-1] < D:
            raise ValueError(
                f"a head of {D} channels is not predicted: attention was measured up to {dims[-1]}"
            )
        D = measured = next(dim for dim in dims if dim >= D)
        rates = {math.log(length): rate for length, dim, rate in self.roofs.attention if dim == measured}
        return flops.attention_flops(heads, T, D) / _between(rates, math.log(T))

    def large(self, precision: str) -> ProductRate:
        """The largest product that was also measured back to back."""
        steady = [p for p in self.roofs.products if p.precision == precision and p.flops_per_s]
        return max(steady, key=lambda p: p.m * p.n * p.k)

    def slowdown(self, dense_s: float, load_s: float, rest_s: float, precision: str) -> float:
        """How many times longer `dense_s` of products and fused attention take under the power limit than in
        bursts, with `rest_s` of other kernels.

        Back to back, a large product draws the limit's power, and its rate falls from that of bursts to the
        lower one. A step lies between: its load is `load_s`, in which the large product would do the same
        FLOPs, over the whole step. 0 leaves the one rate, 1 the other, and between the two the rate is taken
        as linear, since power is a mean over time. The load depends on the step's time.
        """
        square, factor = self.large(precision), 1.0
        lost = 1 - square.flops_per_s / square.burst_flops_per_s
        for _ in range(ROUNDS):  # a longer step has less load
            factor = 1 / (1 - min(1.0, load_s / (rest_s + factor * dense_s)) * lost)
        return factor


def _between(values: dict[float, float], at: float) -> float:
    """The value at a place between known ones, on straight lines."""
    places = sorted(values)
    return float(np.interp(at, places, [values[place] for place in places]))

"""Pictures: drawn of names that anybody wrote, by a matplotlib that anybody set up."""

import re
from xml.etree import ElementTree

import pytest
import runs

from common.traced import Block, Launch, MemoryUse
from report import charts, drawn


@pytest.mark.parametrize("name", ["$x^2$ $\\frac$", "a & <b>", "x" * 300])
def test_a_name_is_text_and_never_markup_or_mathematics(name):
    launches = [Launch(name, "loss", 0.0, 1.0), Launch(name, name, 1.0, 1.0)]
    pictures = [
        drawn.stacked([drawn.Bar(name, {"loss": 1.0, "gaps": 0.5}, name), drawn.Bar(name, None, name)], "ms"),
        drawn.timeline([(name, Block(launches, 2.0, launches, 2.0), ""), (name, None, name)]),
        drawn.memory([(name, runs.memory_use(), ""), (name, None, name)]),
        charts.roofline([(name, 10.0, 1e12)], 1e12, {"BF16": 1e14}),
        charts.loss_curves([(name, [3.0, 2.0]), (name, [2.0])]),
    ]  # fmt: skip
    for svg in pictures:
        said = [text for part in ElementTree.fromstring(svg).iter() for text in part.itertext()]
        assert any(text.startswith(name[:15]) for text in said)
        assert all("x" * 71 not in text for text in said if "loss)" not in text and "ms (" not in text)
        assert ElementTree.fromstring(drawn.standalone(svg)) is not None


def boxes(svg):
    """Left edge and width of every box with a title, and the title."""
    found = re.findall(r'<rect x="([-\d.]+)"[^>]* width="([-\d.]+)"[^>]*><title>([^<]*)', svg)
    return [(float(x), float(width), title) for x, width, title in found]


def test_bars_share_one_scale_and_shares_fill_the_width():
    bars = [drawn.Bar("a", {"loss": 30.0, "attention": 10.0}, ""), drawn.Bar("b", {"loss": 10.0}, "", mark=20.0)]
    (_, a, said), (x, b, _), (_, c, _) = boxes(drawn.stacked(bars, "ms"))
    assert x == pytest.approx(a, abs=0.01) and a == pytest.approx(3 * b, abs=0.05) and b == pytest.approx(c)
    assert said == "loss: 30.0 ms, 75%" and f'x1="{20 / 40 * drawn.WIDTH:.1f}"' in drawn.stacked(bars, "ms")
    widths = [width for _, width, _ in boxes(drawn.stacked(bars, "ms", shares=True))]
    assert widths[0] + widths[1] == pytest.approx(drawn.WIDTH, abs=0.02) and widths[2] == drawn.WIDTH


def test_blocks_share_one_time_axis_and_backward_follows_forward():
    slow = Block([Launch("gemm", "loss", 0.0, 10.0)], 10.0, [Launch("gemm", "loss", 0.0, 20.0)], 20.0)
    fast = Block([Launch("gemm", "loss", 0.0, 1.0)], 1.0, [Launch("gemm", "loss", 0.5, 1.5)], 2.0)
    slow_on, slow_back, fast_on, fast_back = boxes(drawn.timeline([("a", slow, ""), ("b", fast, "")]))
    assert slow_on[1] == pytest.approx(10 * fast_on[1], rel=0.1) and slow_back[0] > slow_on[0] + slow_on[1]
    assert slow_back[0] + slow_back[1] <= drawn.WIDTH and fast_back[0] > fast_on[0] + fast_on[1]
    assert slow_on[2] == "matrix product: 10.000 ms (loss)"


def test_a_peak_is_named_by_its_part_of_the_step_and_what_holds_most_of_it():
    use = runs.memory_use()
    assert drawn.describe_peak(use) == "in backward, 67% activations"
    use.peak_ms = 10.0
    assert drawn.describe_peak(use) == "in the optimizer, 100% optimizer"
    use.backward_ms = use.optimizer_ms = None
    assert drawn.describe_peak(use).startswith("in forward")


def test_memory_is_drawn_phase_by_phase_however_long_each_took():
    use = runs.memory_use()
    shape = next(points for points, title in _shapes(drawn.memory([("a", use, "")])) if title.startswith("activations"))
    edges = sorted({x for x, _ in shape})
    forward, backward, update = (share * drawn.WIDTH for share in drawn.PHASES.values())
    assert edges == pytest.approx([forward, (forward + backward) / 2, backward, (backward + update) / 2, update,
                                   drawn.WIDTH], abs=0.1)  # fmt: skip
    use.optimizer_ms = 10.0
    shape = next(points for points, title in _shapes(drawn.memory([("a", use, "")])) if title.startswith("optimizer"))
    (*_, last), high = [x for x, y in shape if y == min(y for _, y in shape)], update + 1
    assert last == drawn.WIDTH > high, "a single level of the last part holds until the step ends"
    use.backward_ms = None
    svg = drawn.memory([("a", use, "")])
    shape, _ = _shapes(svg)[0]
    assert sorted({x for x, _ in shape})[-1] == drawn.WIDTH and "backward</text>" not in svg, "no phase is known"
    empty = MemoryUse([], {}, 0, 0.0)
    assert "no allocation was seen" in drawn.memory([("a", empty, "")])


def _shapes(svg):
    """The corners of every polygon, and its title."""
    found = re.findall(r'<polygon points="([^"]+)"[^>]*><title>([^<]*)', svg)
    return [([tuple(map(float, point.split(","))) for point in points.split()], title) for points, title in found]

"""Charts: drawn of names that anybody wrote, by a matplotlib that anybody set up."""

from xml.etree import ElementTree

import pytest

from report import charts


@pytest.mark.parametrize("name", ["$x^2$ $\\frac$", "a & <b>", "x" * 300])
def test_a_name_is_text_and_never_markup_or_mathematics(name):
    bars = [charts.Bar(name, 2.0, name, 1.9, 2.1), charts.Bar(name, None, name)]
    stacks = [(name, {"loss": 1.0, "gaps": 0.5}, ""), (name, None, name)]
    drawn = [
        charts.falling_bars(bars, "ms"), charts.stacked_bars(stacks, "ms", shares=True),
        charts.roofline([(name, 10.0, 1e12)], 1e12, {"BF16": 1e14}, [name]),
        charts.loss_curves([(name, [3.0, 2.0], ""), (name, [], name)]), charts.strip_plot([(name, 1.0, [1.0], name)]),
    ]  # fmt: skip
    for svg in drawn:
        said = "".join(ElementTree.fromstring(svg).itertext())
        assert name[:15] in said and "x" * 65 not in said

"""Charts are well-formed whatever they are given, and drawn where their axes say."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.sim.report.chart import HEIGHT, TICKS, TOP, WIDTH, Chart, Series, steps, svg

VALUES = st.floats(0, 1e9)
SERIES = st.builds(
    Series,
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=20),
    st.lists(st.tuples(VALUES, VALUES), max_size=20),
    st.booleans(),
    st.booleans(),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(chart))


@example([Series("", [(5e-324, 5e-324)], False, False)], True, None)
@example([Series("", [(5e-324, 5e-324)], False, False)], False, None)
@given(st.lists(SERIES, max_size=12), st.booleans(), st.none() | st.floats(0.001, 1e6))
def test_every_chart_is_well_formed_and_stays_inside_its_frame(
    series: list[Series], log_x: bool, y_max: float | None
) -> None:
    root = drawn(Chart("a & <b>", "x", "y", series, log_x, y_max))

    lines = [path for path in root.iter("path") if path.find("title") is not None]
    assert [line.findtext("title") for line in lines] == [each.name for each in series if each.points]
    for line in lines:
        for text in NUMBER.findall(line.attrib["d"]):
            assert -0.1 <= float(text) <= WIDTH
    assert sum(text.get("class") == "name" for text in root.iter("text")) == len(series)


@given(st.floats(1e-6, 1e12))
def test_axis_steps_are_round_and_few(most: float) -> None:
    found = steps(most)

    assert 2 <= len(found) <= TICKS + 1
    assert found[0] == 0
    assert found[-1] <= most * (1 + 1e-6)
    assert f"{found[1]:.0e}"[0] in "125"


@pytest.mark.parametrize(("log_x", "places"), [(False, (0.0, 0.1, 1.0)), (True, (0.0, 0.5, 1.0))])
def test_chart_values_are_drawn_in_proportion_to_the_axis(log_x: bool, places: tuple[float, ...]) -> None:
    chart = Chart("t", "x", "y", [Series("s", [(1.0, 0.0), (10.0, 0.5), (100.0, 1.0)])], log_x, 1.0)
    if not log_x:
        chart = chart._replace(series=[Series("s", [(0.0, 0.0), (10.0, 0.5), (100.0, 1.0)])])
    line = next(path for path in drawn(chart).iter("path") if path.find("title") is not None)
    numbers = [float(text) for text in NUMBER.findall(line.attrib["d"])]
    across, up = numbers[::2], numbers[1::2]

    assert [(x - across[0]) / (across[-1] - across[0]) for x in across] == [
        pytest.approx(p, abs=0.01) for p in places
    ]
    assert up[-1] == TOP
    assert up[1] == pytest.approx((up[0] + up[-1]) / 2)


def test_step_series_is_drawn_horizontally_then_vertically() -> None:
    stepped = svg(Chart("t", "x", "y", [Series("s", [(0.0, 1.0), (1.0, 2.0)], steps=True)]))

    assert re.search(r'd="M[\d. ]+H[\d.]+V[\d.]+"', stepped)
    assert f'viewBox="0 0 {WIDTH} {HEIGHT + 16}"' in stepped

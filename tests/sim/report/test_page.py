"""The report page is complete and self-contained, and names in it are escaped."""

from html.parser import HTMLParser

import pytest
from tests.sim.report.made import LOAD, report_of

from forebay.sim.replay.cluster import SimCluster
from forebay.sim.report.facts import facts, span
from forebay.sim.report.page import charts, page
from forebay.sim.report.tables import COMPARED, tables


class Reader(HTMLParser):
    """What the page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


def test_page_is_self_contained_with_facts_figures_charts_and_command() -> None:
    text = page(report_of())
    read = Reader(text)

    for words in (
        "12,031 in 59 min",
        "37.4%",
        "90.0%",
        "60.0%",
        "Refused: random: cut_off 1, queue_timeout 7.",
        "forebay simulate --trace",
    ):
        assert words in read.words, words
    assert read.tags.count("svg") == 4
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert not {"src", "href", "xlink:href"} & read.attributes
    assert "//" not in text.replace("</", "")
    assert "Against cpr" not in read.words, "one seed tells nothing of what is by chance"


def test_significant_differences_between_policies_are_coloured() -> None:
    text = page(report_of(seeds=3, scales=(0.8, 1.0)))

    assert Reader(text).tags.count("table") == 4
    assert "Step times x 0.8" in text
    assert "Against cpr" in text
    assert 'class="worse">-30.0 pp<small>± 0.0 pp</small>' in text
    assert "91.0%<small>± 2.5%</small>" in text


def test_report_escapes_names() -> None:
    text = page(report_of(workload="<script>alert(1)</script>.csv"))

    assert "script" not in Reader(text).tags
    assert "<script>" not in text


def test_report_tables_omit_unused_columns_and_compare_with_the_first_policy() -> None:
    report = report_of(seeds=2)
    main, compared = tables(report.rows, report.scope, 1.0)
    assert compared is not None

    assert "cost" not in main.columns
    assert [policy for policy, _ in main.lines] == ["cpr", "random"]
    assert [policy for policy, _ in compared.lines] == ["random"]
    assert len(compared.columns) == len(COMPARED)
    assert all(len(cells) == len(main.columns) for _, cells in main.lines)


def test_report_of_scaled_fleets_has_size_figures_and_a_size_chart() -> None:
    report = report_of(seeds=2, fleets=("forebay", "static"))
    main, compared = tables(report.rows, report.scope, 1.0)
    told = dict(facts(report.scope, SimCluster(start_s=40.0)))
    assert compared is not None

    assert main.head == compared.head == "fleet"
    assert [name for name, _ in main.lines] == ["forebay", "static"]
    assert {"replicas", "at most", "turns", "GPU-hours"} <= {*main.columns}
    assert {"turns", "GPU-hours"} <= {*compared.columns}
    assert "1 to 64" in told["fleet"]
    assert "a start takes 40 s" in told["fleet"]
    assert [chart.title for chart in charts(report)][-1] == "Replicas"
    assert "Less forebay" not in page(report)
    assert "Against forebay" in page(report)
    assert "fleet" not in dict(facts(report_of().scope, SimCluster()))


def test_report_facts_list_non_default_settings() -> None:
    scope = report_of(seeds=2, scales=(0.8,)).scope._replace(load=LOAD._replace(hit_share=None))
    cluster = SimCluster(speeds=(1.0, 0.5), kv_tokens=100_000, reports_blocks=False, replicas=1)
    told = dict(facts(scope, cluster))

    assert told["cluster"] == "1 replica of 70B bf16, each on 4 x h100_sxm, speeds 1, 0.5, 100,000 KV tokens"
    assert "without reports of prefix caches" in told["gateways"]
    assert "no cache can hit" in told["prefixes"]
    assert told["seeds"].startswith("0 to 1")
    assert told["step times"].startswith("0.8 times")
    assert {"seeds", "step times"}.isdisjoint(dict(facts(report_of().scope, SimCluster())))


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.04, "42 s"), (3540, "59 min"), (10_000, "2.8 hours"), (604_800, "7.0 days")]
)
def test_report_times_have_a_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text

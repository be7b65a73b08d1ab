"""From options to a plan, or to everything that is wrong with them."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.cli.simulate.command import FLEETS, TRACES, TraceOption
from forebay.cli.simulate.plan import (
    DEFAULT_POLICIES,
    DEFAULT_REQUESTS,
    DEFAULT_TRACE,
    MORE_OPTIONS,
    OPTIONS,
    POLICIES,
    Run,
    Wish,
    alone,
    command,
    plan,
)
from forebay.core.model import Policy
from forebay.sim.fleet import policies as sizers
from forebay.sim.load.named import NAMES
from forebay.sim.rivals import RIVALS


def test_nothing_wished_is_the_default_trace_and_policies_once() -> None:
    found = plan(Wish())

    assert found.policies == DEFAULT_POLICIES
    assert found.runs == [Run(0, 1.0, policy) for policy in DEFAULT_POLICIES]
    assert found.cluster == type(found.cluster)()
    assert found.jobs >= 1
    assert len(found.workload(0).arrivals) == DEFAULT_REQUESTS
    assert len(plan(Wish(from_s=60)).workload(0).arrivals) > DEFAULT_REQUESTS


def test_who_sizes_fleets_is_compared_on_a_whole_trace_with_the_usual_policy() -> None:
    found = plan(Wish(fleets=("forebay", "static@6", "forebay")))

    assert found.runs == [Run(0, 1.0, "cpr", "forebay"), Run(0, 1.0, "cpr", "static@6")]
    assert found.names == ("forebay", "static@6")
    assert len(found.workload(0).arrivals) > DEFAULT_REQUESTS
    both = plan(Wish(fleets=("static",), policies=("gie", "cpr")))
    assert both.names == ("static, gie", "static")


def test_what_the_description_says_of_scaling_holds_unless_another_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("replicas: 2\nscale: {max: 6, policy: kpa, target: 20}\nstart_s: 45\n")

    assert plan(Wish(file=path, policies=("cpr",))).runs == [Run(0, 1.0, "cpr", "kpa")]
    assert plan(Wish(file=path, fleets=("static",))).fleets == ("static",)
    assert plan(Wish()).fleets == ()


def test_runs_of_one_seed_follow_each_other() -> None:
    runs = plan(Wish(policies=("cpr", "p2c", "cpr"), seed=5, seeds=2, scales="0.8,1")).runs

    assert runs[:4] == [Run(5, 0.8, "cpr"), Run(5, 0.8, "p2c"), Run(5, 1.0, "cpr"), Run(5, 1.0, "p2c")]
    assert {run.seed for run in runs[4:]} == {6}


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(policies=("cpr", "sglang")), "--policy: found 'sglang'"),
        (Wish(policies=("smg_cache_awar",)), "did you mean smg_cache_aware?"),
        (Wish(policies=("nonsense",)), "allowed: cpr, prefix_affinity"),
        (Wish(fleets=("foreby",)), "--fleet: found 'foreby' (did you mean forebay?); allowed: forebay, hpa[@TARGET]"),
        (Wish(fleets=("static@0",)), "--fleet: found 'static@0'"),
        (
            Wish(fleets=("static", "oracle"), policies=("gie",)),
            "gie cannot be simulated with replicas that come and go",
        ),
        (Wish(assignments=("scale.max=4",), policies=("cpr", "gie")), "--policy: gie cannot be simulated"),
        (Wish(trace="moncake"), "--trace: found 'moncake' (did you mean mooncake?)"),
        (Wish(speed=0), "--speed: found 0"),
        (Wish(speed=float("nan")), "--speed: found nan"),
        (Wish(seeds=0), "--seeds: found 0"),
        (Wish(seed=-1), "--seed: found -1"),
        (Wish(requests=0), "--requests: found 0"),
        (Wish(from_s=-1), "--from: found -1"),
        (Wish(from_s=60, until_s=60), "--until: found 60"),
        (Wish(jobs=0), "--jobs: found 0"),
        (Wish(scales="1,"), "--scale: found '1,'"),
        (Wish(scales="0"), "--scale: found '0'"),
        (Wish(scales="inf"), "--scale: found 'inf'"),
        (Wish(assignments=("replicas",)), "expected PATH=VALUE"),
    ],
)
def test_bad_options_are_wrong_usage_and_name_what_is_allowed(wish: Wish, says: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(wish)

    assert says in str(caught.value)
    assert caught.value.exit_code == WRONG_USAGE


def test_all_bad_options_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        plan(Wish(policies=("x",), trace="y", speed=-1, scales="z"))

    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--policy", "--trace", "--speed", "--scale"]


def test_all_that_is_wrong_with_a_description_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "replicas: 0\nspeds: [1]\nslo:\n  ttft_s: soon\ngpu: h100_sxm\nmodel: 13B\nscale: {max: 700, min: 900}\n"
        "start_s: -1\n"
    )
    with pytest.raises(UserError) as caught:
        plan(Wish(file=path, replicas=500))
    told = str(caught.value)

    assert caught.value.exit_code == 1
    assert "6 problems; nothing was simulated" in told
    for words in (
        "set  replicas: found 500; allowed: a whole number from 1 to 256",
        "line 2  speds: found an unknown key",
        "did you mean `speeds`?",
        "line 4  slo.ttft_s",
        "line 7  scale.min: found 900; allowed: at most 700",
        "line 8  start_s: found -1",
        "line 6  model: found h100_sxm/13B/tp4/bf16; allowed: one of",
    ):
        assert words in told, words


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_description_is_the_default_cluster(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)

    assert plan(Wish(file=path)).cluster == plan(Wish()).cluster


@pytest.mark.parametrize(("text", "says"), [("- 1\n", "a list of 1"), ("5\n", "allowed: a section")])
def test_a_description_that_is_no_section_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        plan(Wish(file=path))


def test_a_description_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        plan(Wish(file=tmp_path / "nowhere.yaml"))


def test_options_go_over_the_description(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("replicas: 4\nspeeds: [1, 0.5]\nslo: {ttft_s: 2}\n")
    found = plan(Wish(file=path, replicas=3, assignments=("slo.tpot_s=0.05", "gateways=2"), scales="0.5"))

    assert found.cluster.replicas == 3
    assert found.cluster.gateways == 2
    assert (found.cluster.slo.ttft_s, found.cluster.slo.tpot_s) == (2, 0.05)


def write_trace(path: Path, requests: int) -> None:
    """One request a second."""
    lines = (
        {"timestamp": at * 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, at]}
        for at in range(requests)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("wish", "times"),
    [
        (Wish(), [0, 1, 2, 3, 4]),
        (Wish(requests=2), [0, 1]),
        (Wish(requests=20), [0, 1, 2, 3, 4]),
        (Wish(from_s=2), [0, 1, 2]),
        (Wish(from_s=1, until_s=3, speed=2), [0, 0.5]),
        (Wish(from_s=1, requests=2, speed=0.5), [0, 2]),
    ],
)
def test_a_part_of_the_trace_is_cut_out_before_it_is_made_faster(
    tmp_path: Path, wish: Wish, times: list[float]
) -> None:
    write_trace(tmp_path / "trace.jsonl", 5)
    found = plan(replace(wish, trace=str(tmp_path / "trace.jsonl"))).workload(0)

    assert [arrival.at_s for arrival in found.arrivals] == times


@pytest.mark.parametrize(
    ("content", "wish", "says"),
    [
        (b"", Wish(), "found nothing; a trace is one of"),
        (b"{\n", Wish(), "line 1"),
        (b"hello\n", Wish(), "'hello'"),
        (
            b'{"timestamp": 1, "input_length": 5, "output_length": 5}\n',
            Wish(from_s=60),
            "this part of the trace has no requests",
        ),
    ],
)
def test_a_trace_that_cannot_be_used_is_told(tmp_path: Path, content: bytes, wish: Wish, says: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        plan(replace(wish, trace=str(path))).workload(0)


@pytest.mark.parametrize(
    ("wish", "line"),
    [
        (Wish(policies=("cpr",)), "forebay simulate --trace mooncake --policy cpr --requests 3000"),
        (Wish(trace="burst", policies=("cpr",)), "forebay simulate --trace burst --policy cpr"),
        (
            Wish(Path("my cluster.yaml"), "azure", policies=("cpr", "p2c"), speed=1.4, replicas=6, seeds=5, jobs=3),
            "forebay simulate 'my cluster.yaml' --trace azure --policy cpr --policy p2c --speed 1.4 --replicas 6 "
            "--seeds 5",
        ),
        (
            Wish(policies=("cpr",), assignments=("slo.ttft_s=2",), requests=9, from_s=1.5, until_s=2, scales="1,2"),
            "forebay simulate --trace mooncake --policy cpr --requests 9 --from 1.5 --until 2 --scale 1,2 "
            "--set slo.ttft_s=2",
        ),
        (
            Wish(trace="azure", fleets=("forebay", "hpa@16"), replicas=2),
            "forebay simulate --trace azure --policy cpr --fleet forebay --fleet hpa@16 --replicas 2",
        ),
    ],
)
def test_the_command_that_gives_the_same_figures_can_be_pasted_into_a_shell(
    wish: Wish, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my cluster.yaml").write_text("")

    assert command(plan(wish).wish) == line


def test_options_name_all_there_is() -> None:
    assert ", ".join(NAMES) == TRACES
    assert set(POLICIES) == {*Policy, *RIVALS}
    assert len(set(POLICIES)) == len(POLICIES)
    assert [each.partition("[")[0] for each in FLEETS.split(", ")] == [*sizers.NAMES]
    assert f"first {DEFAULT_REQUESTS:,} requests of {DEFAULT_TRACE}" in TraceOption.__metadata__[0].show_default


@pytest.mark.parametrize(
    ("wish", "report", "found"),
    [
        (Wish(file=Path("c.yaml"), trace="azure", policies=("cpr",), seeds=3), None, "FILE, --trace, --policy"),
        (Wish(assignments=("replicas=2",), fleets=("static",), jobs=1), None, "--fleet, --set, --jobs"),
        (Wish(speed=2, scales="1,2", until_s=3), Path("r.html"), "--speed, --until, --scale, --report"),
    ],
)
def test_what_another_mode_would_ignore_is_refused_by_name(wish: Wish, report: Path | None, found: str) -> None:
    with pytest.raises(UserError) as caught:
        alone("--depth full", wish, report, takes=("--seed", "--seeds"))

    assert str(caught.value) == f"--depth full: found {found} beside it; allowed: --seed and --seeds and --json"
    assert caught.value.exit_code == WRONG_USAGE


def test_what_another_mode_takes_is_taken() -> None:
    alone("--depth full", Wish(seed=5, seeds=3), None, takes=("--seed", "--seeds"))
    alone("--calibration", Wish(), None, takes=())


def test_every_option_is_known_by_its_name() -> None:
    assert {*OPTIONS.values(), *MORE_OPTIONS.values()} == {field.name for field in fields(Wish)}


def test_a_cluster_file_is_told_from_a_description(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("models:\n  - {name: chat, task: chat, source: ./chat.gguf}\n")
    with pytest.raises(
        UserError, match="line 1  models: found a cluster file of `forebay up`; allowed: a description"
    ):
        plan(Wish(file=path))


@pytest.mark.parametrize("trace", ["azure", "poisson", "table.csv"])
def test_a_model_is_chosen_from_decision_records_only(tmp_path: Path, trace: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text("t_s,input_tokens,output_tokens\n0,5,5\n")
    with pytest.raises(UserError, match=r"a model \('chat'\) can be chosen from decision records only"):
        plan(Wish(trace=str(path) if trace == "table.csv" else trace, model="chat")).workload(0)

"""From options to a simulation plan, or to all their problems."""

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
    SimulationOptions,
    check_alone,
    command,
    plan,
)
from forebay.core.model import Policy
from forebay.sim.fleet import policies as sizers
from forebay.sim.load.named import NAMES
from forebay.sim.rivals import RIVALS


def test_without_options_the_default_trace_and_policies_are_run_once() -> None:
    found = plan(SimulationOptions())

    assert found.policies == DEFAULT_POLICIES
    assert found.runs == [Run(0, 1.0, policy) for policy in DEFAULT_POLICIES]
    assert found.cluster == type(found.cluster)()
    assert found.jobs >= 1
    assert len(found.workload(0).arrivals) == DEFAULT_REQUESTS
    assert len(plan(SimulationOptions(from_s=60)).workload(0).arrivals) > DEFAULT_REQUESTS


def test_autoscaling_policies_are_compared_on_a_whole_trace_with_the_default_routing() -> None:
    found = plan(SimulationOptions(fleets=("forebay", "static@6", "forebay")))

    assert found.runs == [Run(0, 1.0, "cpr", "forebay"), Run(0, 1.0, "cpr", "static@6")]
    assert found.names == ("forebay", "static@6")
    assert len(found.workload(0).arrivals) > DEFAULT_REQUESTS
    both = plan(SimulationOptions(fleets=("static",), policies=("gie", "cpr")))
    assert both.names == ("static, gie", "static")


def test_autoscaling_of_the_description_applies_unless_overridden(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("replicas: 2\nscale: {max: 6, policy: kpa, target: 20}\nstart_s: 45\n")

    assert plan(SimulationOptions(file=path, policies=("cpr",))).runs == [Run(0, 1.0, "cpr", "kpa")]
    assert plan(SimulationOptions(file=path, fleets=("static",))).fleets == ("static",)
    assert plan(SimulationOptions()).fleets == ()


def test_runs_are_grouped_by_seed() -> None:
    runs = plan(SimulationOptions(policies=("cpr", "p2c", "cpr"), seed=5, seeds=2, scales="0.8,1")).runs

    assert runs[:4] == [Run(5, 0.8, "cpr"), Run(5, 0.8, "p2c"), Run(5, 1.0, "cpr"), Run(5, 1.0, "p2c")]
    assert {run.seed for run in runs[4:]} == {6}


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (SimulationOptions(policies=("cpr", "sglang")), "--policy: found 'sglang'"),
        (SimulationOptions(policies=("smg_cache_awar",)), "did you mean smg_cache_aware?"),
        (SimulationOptions(policies=("nonsense",)), "allowed: cpr, prefix_affinity"),
        (
            SimulationOptions(fleets=("foreby",)),
            "--fleet: found 'foreby' (did you mean forebay?); allowed: forebay, hpa[@TARGET]",
        ),
        (SimulationOptions(fleets=("static@0",)), "--fleet: found 'static@0'"),
        (
            SimulationOptions(fleets=("static", "oracle"), policies=("gie",)),
            "gie cannot be simulated with a changing number of replicas",
        ),
        (
            SimulationOptions(assignments=("scale.max=4",), policies=("cpr", "gie")),
            "--policy: gie cannot be simulated",
        ),
        (SimulationOptions(trace="moncake"), "--trace: found 'moncake' (did you mean mooncake?)"),
        (SimulationOptions(speed=0), "--speed: found 0"),
        (SimulationOptions(speed=float("nan")), "--speed: found nan"),
        (SimulationOptions(seeds=0), "--seeds: found 0"),
        (SimulationOptions(seed=-1), "--seed: found -1"),
        (SimulationOptions(requests=0), "--requests: found 0"),
        (SimulationOptions(from_s=-1), "--from: found -1"),
        (SimulationOptions(from_s=60, until_s=60), "--until: found 60"),
        (SimulationOptions(jobs=0), "--jobs: found 0"),
        (SimulationOptions(scales="1,"), "--scale: found '1,'"),
        (SimulationOptions(scales="0"), "--scale: found '0'"),
        (SimulationOptions(scales="inf"), "--scale: found 'inf'"),
        (SimulationOptions(assignments=("replicas",)), "expected PATH=VALUE"),
    ],
)
def test_invalid_options_are_usage_errors_with_allowed_values(wish: SimulationOptions, says: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(wish)

    assert says in str(caught.value)
    assert caught.value.exit_code == WRONG_USAGE


def test_all_invalid_options_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        plan(SimulationOptions(policies=("x",), trace="y", speed=-1, scales="z"))

    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--policy", "--trace", "--speed", "--scale"]


def test_all_problems_of_a_description_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "replicas: 0\nspeds: [1]\nslo:\n  ttft_s: soon\ngpu: h100_sxm\nmodel: 13B\nscale: {max: 700, min: 900}\n"
        "start_s: -1\n"
    )
    with pytest.raises(UserError) as caught:
        plan(SimulationOptions(file=path, replicas=500))
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

    assert plan(SimulationOptions(file=path)).cluster == plan(SimulationOptions()).cluster


@pytest.mark.parametrize(("text", "says"), [("- 1\n", "a list of 1"), ("5\n", "allowed: a section")])
def test_description_that_is_not_a_mapping_is_rejected(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        plan(SimulationOptions(file=path))


def test_unreadable_description_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        plan(SimulationOptions(file=tmp_path / "nowhere.yaml"))


def test_options_override_the_description(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("replicas: 4\nspeeds: [1, 0.5]\nslo: {ttft_s: 2}\n")
    found = plan(
        SimulationOptions(file=path, replicas=3, assignments=("slo.tpot_s=0.05", "gateways=2"), scales="0.5")
    )

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
        (SimulationOptions(), [0, 1, 2, 3, 4]),
        (SimulationOptions(requests=2), [0, 1]),
        (SimulationOptions(requests=20), [0, 1, 2, 3, 4]),
        (SimulationOptions(from_s=2), [0, 1, 2]),
        (SimulationOptions(from_s=1, until_s=3, speed=2), [0, 0.5]),
        (SimulationOptions(from_s=1, requests=2, speed=0.5), [0, 2]),
    ],
)
def test_trace_is_sliced_before_it_is_sped_up(tmp_path: Path, wish: SimulationOptions, times: list[float]) -> None:
    write_trace(tmp_path / "trace.jsonl", 5)
    found = plan(replace(wish, trace=str(tmp_path / "trace.jsonl"))).workload(0)

    assert [arrival.at_s for arrival in found.arrivals] == times


@pytest.mark.parametrize(
    ("content", "wish", "says"),
    [
        (b"", SimulationOptions(), "found nothing; a trace is one of"),
        (b"{\n", SimulationOptions(), "line 1"),
        (b"hello\n", SimulationOptions(), "'hello'"),
        (
            b'{"timestamp": 1, "input_length": 5, "output_length": 5}\n',
            SimulationOptions(from_s=60),
            "this part of the trace has no requests",
        ),
    ],
)
def test_unusable_trace_is_an_error(tmp_path: Path, content: bytes, wish: SimulationOptions, says: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        plan(replace(wish, trace=str(path))).workload(0)


@pytest.mark.parametrize(
    ("wish", "line"),
    [
        (SimulationOptions(policies=("cpr",)), "forebay simulate --trace mooncake --policy cpr --requests 3000"),
        (SimulationOptions(trace="burst", policies=("cpr",)), "forebay simulate --trace burst --policy cpr"),
        (
            SimulationOptions(
                Path("my cluster.yaml"), "azure", policies=("cpr", "p2c"), speed=1.4, replicas=6, seeds=5, jobs=3
            ),
            "forebay simulate 'my cluster.yaml' --trace azure --policy cpr --policy p2c --speed 1.4 --replicas 6 "
            "--seeds 5",
        ),
        (
            SimulationOptions(
                policies=("cpr",), assignments=("slo.ttft_s=2",), requests=9, from_s=1.5, until_s=2, scales="1,2"
            ),
            "forebay simulate --trace mooncake --policy cpr --requests 9 --from 1.5 --until 2 --scale 1,2 "
            "--set slo.ttft_s=2",
        ),
        (
            SimulationOptions(trace="azure", fleets=("forebay", "hpa@16"), replicas=2),
            "forebay simulate --trace azure --policy cpr --fleet forebay --fleet hpa@16 --replicas 2",
        ),
    ],
)
def test_reproduction_command_is_shell_quoted(
    wish: SimulationOptions, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my cluster.yaml").write_text("")

    assert command(plan(wish).options) == line


def test_option_help_lists_all_values() -> None:
    assert ", ".join(NAMES) == TRACES
    assert set(POLICIES) == {*Policy, *RIVALS}
    assert len(set(POLICIES)) == len(POLICIES)
    assert [each.partition("[")[0] for each in FLEETS.split(", ")] == [*sizers.NAMES]
    assert f"first {DEFAULT_REQUESTS:,} requests of {DEFAULT_TRACE}" in TraceOption.__metadata__[0].show_default


@pytest.mark.parametrize(
    ("wish", "report", "found"),
    [
        (
            SimulationOptions(file=Path("c.yaml"), trace="azure", policies=("cpr",), seeds=3),
            None,
            "FILE, --trace, --policy",
        ),
        (SimulationOptions(assignments=("replicas=2",), fleets=("static",), jobs=1), None, "--fleet, --set, --jobs"),
        (SimulationOptions(speed=2, scales="1,2", until_s=3), Path("r.html"), "--speed, --until, --scale, --report"),
    ],
)
def test_options_of_another_mode_are_rejected_by_name(
    wish: SimulationOptions, report: Path | None, found: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_alone("--depth full", wish, report, takes=("--seed", "--seeds"))

    assert (
        str(caught.value) == f"--depth full: cannot be combined with {found}; allowed: --seed and --seeds and --json"
    )
    assert caught.value.exit_code == WRONG_USAGE


def test_options_that_a_mode_uses_are_accepted() -> None:
    check_alone("--depth full", SimulationOptions(seed=5, seeds=3), None, takes=("--seed", "--seeds"))
    check_alone("--calibration", SimulationOptions(), None, takes=())


def test_every_field_has_an_option_name() -> None:
    assert {*OPTIONS.values(), *MORE_OPTIONS.values()} == {field.name for field in fields(SimulationOptions)}


def test_cluster_file_is_distinguished_from_a_description(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("models:\n  - {name: chat, task: chat, source: ./chat.gguf}\n")
    with pytest.raises(
        UserError, match="line 1  models: found a cluster file of `forebay up`; allowed: a description"
    ):
        plan(SimulationOptions(file=path))


@pytest.mark.parametrize("trace", ["azure", "poisson", "table.csv"])
def test_model_option_requires_decision_records(tmp_path: Path, trace: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text("t_s,input_tokens,output_tokens\n0,5,5\n")
    with pytest.raises(UserError, match=r"a model \('chat'\) can be chosen from decision records only"):
        plan(SimulationOptions(trace=str(path) if trace == "table.csv" else trace, model="chat")).workload(0)

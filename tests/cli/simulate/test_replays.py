"""Whole simulations: small ones with outcomes calculated by hand, and the command as a process."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Run as RunCommand

from forebay.cli.settings import UserError
from forebay.cli.simulate.plan import Plan, SimulationOptions, plan
from forebay.cli.simulate.processes import ctrl_c_after, replays
from forebay.sim.engine import hardware
from forebay.sim.report.figures import Result

GAP_S = 100
PROMPT, ANSWER = 2000, 11


def write_trace(path: Path, requests: int, *, shared: bool) -> Path:
    """Requests so far apart that none meets another. `shared`: they begin with the same 512 tokens."""
    lines = (
        {
            "timestamp": at * GAP_S * 1000,
            "input_length": PROMPT,
            "output_length": ANSWER,
            "hash_ids": [0 if shared else 4 * at + 1, 4 * at + 2, 4 * at + 3, 4 * at + 4],
        }
        for at in range(requests)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def results(planned: Plan) -> dict[tuple[str, float, int], Result]:
    found = {}
    with closing(replays(planned, planned.workload)) as told:
        for each in told:
            if each.result is not None:
                found[each.run.policy, each.run.scale, each.run.seed] = each.result
    return found


def test_requests_without_contention_take_the_time_of_their_steps(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 30, shared=False)
    planned = plan(
        SimulationOptions(trace=str(trace), policies=("cpr", "plain_random"), replicas=2, scales="1,2", jobs=2)
    )
    step = hardware("h100_sxm", "70B", 4).step
    first_s = step.step_s(PROMPT, PROMPT * PROMPT / 2, 0, 0)
    context = PROMPT + (ANSWER + 1) / 2
    token_s = step.step_s(1, 0, context, 1)

    found = results(planned)

    assert set(found) == {(policy, scale, 0) for policy in ("cpr", "plain_random") for scale in (1.0, 2.0)}
    for (policy, scale, _), result in found.items():
        summary = result.summary
        assert summary.goodput == 1.0, policy
        assert summary.ttft_s == pytest.approx([scale * first_s] * 3, rel=0.01)
        assert summary.tpot_s == pytest.approx([scale * token_s] * 3, rel=0.01)
        assert summary.e2e_s == pytest.approx([scale * (first_s + 10 * token_s)] * 3, rel=0.01)
        assert summary.cache_hit == 0
        assert summary.refused == {}


def test_prefix_shared_by_all_prompts_is_cached_by_one_replica(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 30, shared=True)
    (result,) = results(plan(SimulationOptions(trace=str(trace), policies=("cpr",), replicas=1))).values()

    assert result.summary.cache_hit == pytest.approx(29 * 512 / (30 * PROMPT))


@pytest.mark.slow
def test_results_depend_on_the_seed_but_not_on_parallelism() -> None:
    wish = SimulationOptions(requests=40, policies=("cpr", "p2c"), seed=3, seeds=2)
    one, two = (results(plan(replace(wish, jobs=jobs))) for jobs in (1, 2))

    assert one == two
    assert one["cpr", 1.0, 3] != one["cpr", 1.0, 4]._replace(seed=3)


def test_requests_too_large_for_any_replica_are_rejected_and_counted() -> None:
    (result,) = results(
        plan(SimulationOptions(requests=40, policies=("cpr",), assignments=("kv_tokens=1024",)))
    ).values()

    assert result.summary.goodput == 0
    assert result.summary.refused == {"context_length_exceeded": 40}


@pytest.mark.slow
def test_a_fleet_is_sized_by_its_policy_and_its_replicas_are_counted(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 8, shared=False)
    wish = SimulationOptions(
        trace=str(trace), fleets=("static@3", "forebay"), replicas=2, assignments=("scale.max=2", "start_s=5")
    )
    planned = plan(wish)
    static, scaled = [told.result for told in replays(planned, planned.workload) if told.result]

    assert (static.fleet, scaled.fleet) == ("static@3", "forebay")
    assert static.summary.goodput == scaled.summary.goodput == 1.0
    assert (static.summary.replicas_max, static.summary.turns) == (3, 0)
    assert static.summary.replica_hours == pytest.approx(3 * static.summary.lasted_s / 3600)
    assert scaled.summary.replicas_max == 2
    assert scaled.summary.replica_hours < 1.7 * scaled.summary.lasted_s / 3600, "one is enough, and is found to be"


def test_crashed_replay_is_reported() -> None:
    planned = plan(SimulationOptions(requests=40, policies=("cpr",)))
    broken = planned._replace(cluster=planned.cluster.model_copy(update={"gpu": "none"}))

    with pytest.raises(UserError, match="The replay of cpr ended with code 1"):
        results(broken)


@pytest.mark.slow
def test_command_compares_autoscaling_policies_and_charts_replicas(run: RunCommand, tmp_path: Path) -> None:
    words = ("simulate", "-n", "80", "--fleet", "forebay", "--fleet", "static@2", "--set", "gpu_hour_price=2")
    done, told = run(*words, "--report", "report.html"), run(*words, "--json")

    assert done.returncode == 0, done.stderr
    assert "fleet" in done.stdout
    assert "static@2" in done.stdout
    documents = json.loads(told.stdout)
    assert [(each["policy"], each["fleet"]) for each in documents] == [("cpr", "forebay"), ("cpr", "static@2")]
    fixed = documents[1]
    assert (fixed["replicas_max"], fixed["turns"], fixed["starts"]) == (2, 0, 0)
    assert fixed["cost"] == pytest.approx(2 * fixed["gpu_hours"])
    page = (tmp_path / "report.html").read_text()
    assert "replicas, also those that start or finish" in page
    assert "--fleet forebay --fleet static@2" in page


@pytest.mark.slow
def test_command_output_is_deterministic_and_writes_a_report(run: RunCommand, tmp_path: Path) -> None:
    words = ("simulate", "-n", "60", "--policy", "cpr", "--policy", "round_robin", "--replicas", "2", "--json")
    done, again = run(*words, "--report", "report.html"), run(*words)

    assert done.returncode == 0, done.stderr
    assert done.stdout == again.stdout
    documents = json.loads(done.stdout)
    assert [each["policy"] for each in documents] == ["cpr", "round_robin"]
    for each in documents:
        assert each["requests"] == 60
        assert 0 < each["goodput"] <= 1
        assert 0 < each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"] < each["e2e_p99_s"]
        assert each["gpu_hours"] == pytest.approx(2 * 4 * each["lasted_s"] / 3600)
    assert "forebay simulate --trace mooncake" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_report_can_be_an_image(run: RunCommand, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("simulate", "-n", "30", "--policy", "cpr", "--report", "report.png")

    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("--trace", "nowhere.csv"), "allowed: mooncake", 2),
        (("--policy", "magic"), "allowed: cpr", 2),
        (("--report", "report.docx"), "ends in .html or .png", 2),
        (("--report", "nowhere/report.html"), "does not exist", 2),
        (("nowhere.yaml",), "No such file", 1),
        (("--set", "gpu=b200"), "gpu: found b200/70B/tp4/bf16; allowed: one of", 1),
    ],
)
def test_invalid_options_are_explained_before_anything_is_simulated(
    run: RunCommand, words: tuple[str, ...], says: str, code: int
) -> None:
    done = run("simulate", *words)

    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_calibration_shows_errors_and_unknowns(run: RunCommand) -> None:
    shown, document = run("simulate", "--calibration"), run("simulate", "--calibration", "--json")

    assert "70B FP8, vLLM" in shown.stdout
    assert "What this does not say" in shown.stdout
    found = json.loads(document.stdout)
    assert {each["points"] for each in found["errors"]} >= {90}
    assert found["caveats"]
    assert "h100_sxm/70B/tp4/bf16" in found["hardware"]


@pytest.mark.slow
def test_ctrl_c_stops_all_processes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli.main", "simulate", "--trace", "mooncake"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_for_children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()

    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    wait_until_gone(process.pid)


def test_ctrl_c_is_deferred_until_the_block_is_complete() -> None:
    done = []

    def give_an_order() -> None:
        with ctrl_c_after():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        give_an_order()

    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def wait_for_children(pid: int) -> None:
    """Until the fork server and a replay are there besides the command itself."""
    while len(members(pid)) < 4:
        time.sleep(0.05)


def wait_until_gone(pid: int) -> None:
    while members(pid):
        time.sleep(0.05)


def members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found

"""`forebay bench` against a server, from request to report."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer

from forebay.cli.bench.plan import Plan, recipe
from forebay.cli.bench.run import Load
from forebay.cli.bench.stats import Samples


def load(server: FakeServer, model: str, **change: object) -> tuple[Load, Samples]:
    plan = Plan(server.url, model, "chat", 4, None, 20, None, 0, "8", "16", True, False, 1, 0, 10.0)
    values = {**{name: getattr(plan, name) for name in plan.__slots__}, **change}

    async def main() -> tuple[Load, Samples]:
        run = Load(recipe(Plan(**values)))
        return run, await run.run()

    server.documents.clear()
    return asyncio.run(main())


def test_every_request_of_a_closed_loop_is_answered_and_timed(server: FakeServer) -> None:
    run, samples = load(server, "chat")

    assert samples.answered == 20
    assert samples.failed == 0
    assert samples.output_tokens == 20 * 7
    assert samples.counted == 0
    assert all(0 < ttft <= latency for ttft, latency in zip(samples.ttft_s, samples.latency_s, strict=True))
    assert run.progress.in_flight == 0
    assert len(server.documents) == 20


def test_warm_up_requests_are_sent_and_not_counted(server: FakeServer) -> None:
    _, samples = load(server, "chat", warmup=6)

    assert samples.answered == 20
    assert len(server.documents) == 26
    assert len({d["messages"][0]["content"] for d in server.documents}) == 26


def test_the_same_seed_gives_the_same_requests_however_late_they_are(server: FakeServer) -> None:
    def prompts(rate: float) -> list[str]:
        load(server, "chat", rate=rate, prompt_tokens="4-40")
        return sorted(each["messages"][0]["content"] for each in server.documents)

    assert prompts(200.0) == prompts(100_000.0)


def test_tokens_are_counted_as_pieces_when_the_server_sends_no_usage(server: FakeServer) -> None:
    _, samples = load(server, "no-usage")

    assert samples.counted == samples.answered == 20
    assert samples.output_tokens == 20 * 7


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("refuse", "429 queue_full"),
        ("error-event", "stream_interrupted in stream"),
        ("cut", "connection_lost in stream"),
    ],
)
def test_failures_are_counted_by_their_code(server: FakeServer, model: str, code: str) -> None:
    _, samples = load(server, model)

    assert dict(samples.errors) == {code: 20}
    assert samples.answered == 0


def test_unanswered_request_times_out(server: FakeServer) -> None:
    run, samples = load(server, "hang", requests=2, timeout_s=0.2)

    assert dict(samples.errors) == {"client_timeout": 2}
    assert run.progress.in_flight == 0


def test_unreachable_server_is_an_error_per_request() -> None:
    plan = Plan("http://127.0.0.1:9", "x", "chat", 2, None, 4, None, 0, "8", "8", True, False, 1, 0, 5.0)

    async def main() -> Samples:
        return await Load(recipe(plan)).run()

    assert dict(asyncio.run(main()).errors) == {"connection_connect": 4}


def test_open_loop_latency_counts_from_the_scheduled_time(server: FakeServer) -> None:
    _, samples = load(server, "chat", rate=400.0, requests=40)

    assert samples.answered == 40
    assert all(lag >= 0 for lag in samples.lag_s)
    assert all(lag <= latency for lag, latency in zip(samples.lag_s, samples.latency_s, strict=True))


def test_a_duration_ends_an_open_loop(server: FakeServer) -> None:
    run, samples = load(server, "chat", rate=100.0, requests=None, duration_s=0.3)

    assert 0 < samples.answered < 100
    assert all(start < 0.3 for start in samples.start_s)
    assert not run.progress.interrupted


def test_stopping_early_keeps_the_samples(server: FakeServer) -> None:
    plan = Plan(server.url, "chat", "chat", 2, None, 1_000_000, None, 0, "8", "8", True, False, 1, 0, 10.0)

    async def main() -> tuple[Load, Samples]:
        run = Load(recipe(plan))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run.run())
            while run.progress.samples.answered < 5:
                await asyncio.sleep(0.005)
            run.stop()
        return run, task.result()

    run, samples = asyncio.run(main())

    assert samples.answered >= 5
    assert samples.failed == 0
    assert run.progress.interrupted
    assert run.progress.in_flight == 0


def test_embeddings_are_measured_too(server: FakeServer) -> None:
    _, samples = load(server, "embed", task="embed", batch=3)

    assert samples.answered == 20
    assert samples.prompt_tokens == 20 * 15
    assert all(math.isnan(v) for v in samples.tpot_s)
    asked = [d["input"] for d in server.documents if "input" in d]  # an earlier test's last request may come late
    assert [len(texts) for texts in asked] == [3] * 20


def test_the_command_prints_a_report(run: Run, server: FakeServer) -> None:
    done = run("bench", "--url", server.url, "--model", "chat", "-n", "20", "--slo-e2e-ms", "60000")

    assert done.returncode == 0, done.stderr
    for words in ("answered", "20 of 20", "time to first token", "p99", "counted by the server", "goodput", "100.0%"):
        assert words in done.stdout


@pytest.mark.slow
def test_the_command_prints_json_and_draws_a_picture(run: Run, server: FakeServer, tmp_path: Path) -> None:
    done = run("bench", "--url", server.url, "--model", "chat", "-n", "12", "--json", "--plot", "out.png")

    report = json.loads(done.stdout)
    assert report["answered"] == 12
    assert report["ttft_ms"]["count"] == 12
    assert report["tokens_from"] == "usage"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_run_without_any_answer_fails_and_shows_the_errors(run: Run, server: FakeServer) -> None:
    done = run("bench", "--url", server.url, "--model", "refuse", "-n", "3")

    assert done.returncode == 1
    assert "429 queue_full" in done.stdout


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("--task", "paint"), "allowed: chat, completions, embed", 2),
        pytest.param(("--prompt-tokens", "x"), "LOW-HIGH", 2, marks=pytest.mark.slow),
        pytest.param(("--plot", "x.bmp"), ".png", 2, marks=pytest.mark.slow),
        pytest.param(("--model", "nobody"), "There is no model 'nobody'", 1, marks=pytest.mark.slow),
    ],
)
def test_invalid_options_are_rejected_before_anything_is_sent(
    run: Run, server: FakeServer, words: tuple[str, ...], says: str, code: int
) -> None:
    server.documents.clear()
    done = run("bench", "--url", server.url, *words)

    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert server.documents == []

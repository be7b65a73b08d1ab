"""Command lines of tritonserver: options that are mapped, ignored, or rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.repository.test_plan import wish as defaults
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.repository import run
from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.options import ServerOptions
from forebay.cli.repository.plan import plan_of
from forebay.cli.repository.triton import TritonOptions, idle_options, verbosity
from forebay.cli.settings import WRONG_USAGE, UserError

wish = defaults
IDLE = {
    "--http-thread-count": "8",
    "--pinned-memory-pool-byte-size": "268435456",
    "--cuda-memory-pool-byte-size": "0:67108864",
    "--cache-directory": "/opt/tritonserver/caches",
    "--backend-directory": "/opt/tritonserver/backends",
    "--model-load-gpu-limit": "0:0.5",
    "--reuse-http-port": "true",
    "--grpc-infer-allocation-pool-size": "8",
    "--min-supported-compute-capability": "6.0",
    "--model-load-retry-count": "2",
}


def test_triton_options_map_to_forebay_options(wish: ServerOptions) -> None:
    triton = TritonOptions(server_id="mine", response_cache_byte_size=1000, trace_file="/x")
    plan = plan_of(wish, GrpcOptions(), triton)
    assert (plan.front.name, plan.rpc.name, plan.models.cache_bytes) == ("mine", "mine", 1000)
    assert plan.tracing.file == "/x"
    with pytest.raises(UserError, match="give only one"):
        plan_of(replace(wish, cache_config="local,size=1M"), GrpcOptions(), triton)
    assert idle_options(triton) == []


def test_each_port_listens_on_its_own_address(wish: ServerOptions) -> None:
    triton = TritonOptions(metrics_address="0.0.0.0", grpc_address="10.0.0.1")
    listen = plan_of(wish, GrpcOptions(), triton).listen
    assert (listen.host, listen.grpc_host, listen.metrics_host) == ("127.0.0.1", "10.0.0.1", "0.0.0.0")
    listen = plan_of(replace(wish, host="::1"), GrpcOptions(), TritonOptions(http_address="0.0.0.0")).listen
    assert (listen.host, listen.grpc_host, listen.metrics_host) == ("0.0.0.0", "::1", "::1")


def test_deprecated_trace_options_map_to_trace_config(wish: ServerOptions) -> None:
    triton = TritonOptions(
        trace_file="/x",
        trace_rate="5",
        trace_count="7",
        trace_log_frequency="2",
        trace_level=["TENSORS", "TIMESTAMPS"],
    )
    found = plan_of(wish, GrpcOptions(), triton).tracing
    assert (found.file, found.rate, found.count, found.log_frequency) == ("/x", 5, 7, 2)
    assert found.levels == ("TIMESTAMPS", "TENSORS")
    assert idle_options(triton) == []


def test_tritonserver_command_line_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(*given: Any) -> int:
        seen.extend(given)
        return 0

    monkeypatch.setattr(run, "run_server", start)
    words = ["serve", "--repository", str(tmp_path), "--log-info", "false", "--log-format", "ISO8601", "--id", "me"]
    words += ["--model-namespacing", "false", "--backend-config=default-max-batch-size=8"]
    settings = ["python,shm-default-byte-size=1048576", "tensorflow,version=2"]
    words += [f"--backend-config={each}" for each in settings]
    result = CliRunner().invoke(app, [*words, *(word for pair in IDLE.items() for word in pair)])
    assert result.exit_code == 0, result.output
    plan, log, _, idle = seen
    assert sorted(idle) == sorted([*IDLE, *(f"--backend-config {each}" for each in settings)])
    assert plan.models.rules.max_batch_default == 8
    logs = log.document()
    assert (logs["log_info"], logs["log_warning"], logs["log_format"]) == (False, True, "ISO8601")


@pytest.mark.parametrize(("word", "on"), [("True", True), ("1", True), ("on", True), ("FALSE", False), ("0", False)])
def test_boolean_options_accept_tritonserver_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, on: bool
) -> None:
    seen: list[Any] = []

    def start(*given: Any) -> int:
        seen.extend(given)
        return 0

    monkeypatch.setattr(run, "run_server", start)
    words = [
        f"--exit-on-error={word}",
        f"--allow-metrics={word}",
        f"--log-info={word}",
        f"--allow-cpu-metrics={word}",
    ]
    result = CliRunner().invoke(app, ["serve", "--repository", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    plan, settings = seen[:2]
    assert (plan.exit_on_error, plan.listen.metrics_port is not None) == (on, on)
    assert settings.document()["log_info"] is on


@pytest.mark.parametrize(("word", "level"), [("true", 1), ("False", 0), ("2", 2), (0, 0)])
def test_log_verbose_is_a_number_or_boolean(word: str | int, level: int) -> None:
    assert verbosity(word) == level
    with pytest.raises(ValueError, match="not a level"):
        verbosity("-1")


def test_boolean_option_rejects_other_values(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--repository", str(tmp_path), "--exit-on-error=maybe"])
    assert result.exit_code == 2
    assert "--exit-on-error" in result.output


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--http-restricted-api", "model-repository:key=value", "gateway with API keys"),
        ("--grpc-restricted-protocol", "shared-memory:key=value", "gateway with API keys"),
        ("--model-namespacing", "true", "Rename one"),
        ("--allow-sagemaker", "true", "not supported"),
        ("--allow-vertex-ai", "true", "not supported"),
    ],
)
def test_unsupported_security_options_are_rejected(tmp_path: Path, option: str, value: str, text: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--repository", str(tmp_path), option, value])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"{option}: ")
    assert text in str(result.exception)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("^X-User|authorization", ["x-user-id", "authorization"]), ("(?-i)x-USER|author", ["authorization"])],
)
def test_patterns_of_headers_ignore_case_as_in_triton(wish: ServerOptions, pattern: str, names: list[str]) -> None:
    plan = plan_of(
        replace(wish, http_header_forward_pattern=pattern),
        GrpcOptions(grpc_header_forward_pattern=pattern),
        TritonOptions(),
    )
    for found in (plan.front.forwarded_headers, plan.rpc.forwarded_headers):
        assert found is not None
        assert [name for name in ("x-user-id", "authorization", "host") if found.search(name)] == names


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("m.onnx", "--host", "::", "--http-port", "1"), "--host, --http-port: only with --repository; one model"),
        (
            ("m.onnx", "--id", "x", "--log-error", "off", "--load-model", "x"),
            "--load-model, --id, --log-error: only with",
        ),
        (("m.onnx", "--grpc-keepalive-time", "9"), "--grpc-keepalive-time: only with --repository"),
        (("--repository", ".", "--port", "1", "--set", "a=b"), "--port, --set: only with one model"),
        (("--repository", ".", "m.onnx"), "either MODEL_SOURCE (one model) or --repository DIR, not both"),
        ((), "Nothing to serve"),
    ],
)
def test_option_of_the_other_kind_of_server_is_rejected(words: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, UserError)
    assert text in str(result.exception)
    assert result.exception.exit_code == WRONG_USAGE

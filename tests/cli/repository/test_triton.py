"""Command lines of tritonserver: what is taken over, what is only noted, and what is refused."""

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
from forebay.cli.repository.triton import TritonOptions, idle_options
from forebay.cli.settings import UserError

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
}


def test_options_that_we_have_by_another_name_mean_the_same(wish: ServerOptions) -> None:
    triton = TritonOptions(server_id="mine", response_cache_byte_size=1000, trace_file="/x")
    plan = plan_of(wish, GrpcOptions(), triton)
    assert (plan.front.name, plan.rpc.name, plan.models.cache_bytes) == ("mine", "mine", 1000)
    assert plan.tracing.file == "/x"
    with pytest.raises(UserError, match="give only one"):
        plan_of(replace(wish, cache_config="local,size=1M"), GrpcOptions(), triton)
    assert idle_options(triton) == []


def test_a_command_line_of_tritonserver_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(*given: Any) -> int:
        seen.extend(given)
        return 0

    monkeypatch.setattr(run, "run_server", start)
    words = ["serve", "--repository", str(tmp_path), "--log-info", "false", "--log-format", "ISO8601", "--id", "me"]
    words += ["--model-namespacing", "false"]
    result = CliRunner().invoke(app, [*words, *(word for pair in IDLE.items() for word in pair)])
    assert result.exit_code == 0, result.output
    _, settings, _, idle = seen
    assert sorted(idle) == sorted(IDLE)
    logs = settings.document()
    assert (logs["log_info"], logs["log_warning"], logs["log_format"]) == (False, True, "ISO8601")


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--http-restricted-api", "model-repository:key=value", "gateway with API keys"),
        ("--grpc-restricted-protocol", "shared-memory:key=value", "gateway with API keys"),
        ("--model-namespacing", "true", "Rename one"),
    ],
)
def test_what_must_not_be_overlooked_is_refused(tmp_path: Path, option: str, value: str, text: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--repository", str(tmp_path), option, value])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"{option}: ")
    assert text in str(result.exception)

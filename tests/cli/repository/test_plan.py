"""The plan made from the options of a model repository."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.options import ServerOptions
from forebay.cli.repository.plan import amount, cpus, plan_of, size, tracing
from forebay.cli.repository.screen import example_request
from forebay.cli.repository.triton import TritonOptions
from forebay.cli.settings import UserError
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.limiter import Amount
from forebay.modelserver.models.options import Control
from forebay.modelserver.serve import Plan

GRPC, TRITON = GrpcOptions(), TritonOptions()


@pytest.fixture
def wish(tmp_path: Path) -> ServerOptions:
    """The defaults of the command."""
    return ServerOptions(repository=[tmp_path])


def made(given: ServerOptions, grpc: GrpcOptions = GRPC, triton: TritonOptions = TRITON) -> Plan:
    """The plan of these options."""
    return plan_of(given, grpc, triton)


def test_plan_from_options(wish: ServerOptions) -> None:
    plan = made(
        replace(
            wish, model_control_mode="explicit", load_model=["a"], memory_budget="1.5GiB",
            hang_timeout_secs=5, process_memory_limit="2G", http_max_bodies_size="1G",
            cache_config="local,size=1M", rate_limit="execution_count", rate_limit_resource=["R:2"],
            strict_model_config="true", allow_grpc="false",
            host_policy=["n,cpu-cores=0-4095", "n,numa-node=0", "g,gpus=MIG-1,MIG-2"],
            backend_config=["x,y=z", "default-max-batch-size=9", "onnxruntime,default-max-batch-size=2"],
            exit_on_error="false",
            metrics_config=["summary_latencies=true", "summary_quantiles=0.5:0.05,0.999:0"],
            max_string_elements=9, http_max_json_output_size="1M",
        ),
        GrpcOptions("high"),
    )  # fmt: skip
    options = plan.models
    assert (options.control, options.startup) == (Control.EXPLICIT, ("a",))
    assert (options.memory_bytes, options.cache_bytes) == (1_610_612_736, 1_048_576)
    assert (options.hang_s, options.rss_bytes_max) == (5.0, 2 * 2**30)
    assert (options.limited, options.amounts) == (True, (Amount("R", 2),))
    assert (options.rules.auto_complete, options.rules.max_batch_default) == (False, 9)
    assert options.rules.max_batch_of == {"onnxruntime": 2}
    assert (plan.latencies.summaries, plan.latencies.quantiles) == (True, (0.5, 0.999))
    assert (options.hosts["n"].cpus, options.hosts["n"].numa_node) == (tuple(range(4096)), 0)
    assert (options.hosts["g"].gpus, options.rules.gpus) == (("MIG-1", "MIG-2"), (0, 1))
    assert (plan.listen.http_port, plan.listen.grpc_port, plan.exit_on_error) == (8000, None, False)
    assert options.strings_max == 9
    assert (plan.body_bytes_max, plan.bodies_bytes_max, plan.front.json_output_bytes_max) == (2**26, 2**30, 2**20)
    assert (plan.latencies.summaries, plan.rpc.compression) == (True, "gzip")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"repository": [Path("/none/at/all")]}, "/none/at/all: no such folder"),
        ({"allow_http": "false", "allow_grpc": "false"}, "would accept no requests"),
        ({"load_model": ["m"]}, "--load-model needs --model-control-mode explicit: 'none' serves all models"),
        ({"http_header_forward_pattern": "("}, "--http-header-forward-pattern: found '('"),
        ({"http_max_bodies_size": "much"}, "--http-max-bodies-size: found 'much'; expected a size"),
        ({"http_header_forward_pattern": "a{9999999999}"}, "--http-header-forward-pattern: found 'a{9999999999}'"),
        ({"memory_budget": "9" * 400}, "--memory-budget: found '999"),
        ({"memory_budget": "much"}, "--memory-budget: found 'much'; expected a size"),
        ({"cache_config": "redis,host=x"}, "--cache-config: found 'redis,host=x'"),
        ({"rate_limit_resource": ["R"]}, "--rate-limit-resource: found 'R'; expected NAME:COUNT"),
        ({"host_policy": ["n,colour=red"]}, "--host-policy: found 'n,colour=red'"),
        ({"host_policy": ["n,cpu-cores=x"]}, "--host-policy: found 'x'; expected CPUs"),
        ({"host_policy": ["n,cpu-cores=4095"]}, "--host-policy: found '4095'; this process may run on none of them"),
        ({"host_policy": ["n,numa-node=4095"]}, "--host-policy: found '4095'; this machine has no such NUMA node"),
        ({"host_policy": ["n,cpu-cores=3-0"]}, "--host-policy: found '3-0'; expected CPUs below 4096"),
        ({"backend_config": ["default-max-batch-size=x"]}, "--backend-config: found 'x'; expected a whole number"),
        ({"backend_config": [",x=y"]}, "--backend-config: found ',x=y'; expected BACKEND,NAME=VALUE, or NAME=VALUE"),
        ({"backend_config": ["python,x"]}, "--backend-config: found 'python,x'; expected BACKEND,NAME=VALUE"),
        ({"trace_config": ["level=LOUD"]}, "--trace-config: found 'level=LOUD'; known levels are TIMESTAMPS, "),
        ({"trace_config": ["opentelemetry,url=x"]}, "--trace-config: found 'opentelemetry,url=x'"),
        ({"trace_config": ["level=TENSORS"]}, "--trace-config: trace file name is not given"),
        ({"metrics_config": ["colour=red"]}, "--metrics-config: found 'colour=red'"),
        ({"metrics_config": ["summary_quantiles=0.5"]}, "expected QUANTILE:ERROR"),
        ({"metrics_config": ["summary_quantiles=1:0"]}, "expected QUANTILE:ERROR"),
        ({"metrics_config": ["summary_quantiles=a:0"]}, "expected QUANTILE:ERROR"),
    ],
)
def test_invalid_value_names_its_option(wish: ServerOptions, change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        made(replace(wish, **change))
    assert text in str(error.value)


def test_model_folder_as_repository_is_rejected_with_a_hint(wish: ServerOptions, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.pbtxt").touch()
    with pytest.raises(UserError) as error:
        made(replace(wish, repository=[tmp_path, tmp_path / "mine"]))
    assert str(error.value).splitlines()[1:] == [
        f"  forebay serve --repository {tmp_path}",
        f"  forebay serve {tmp_path}/mine",
    ]


def test_option_values_are_parsed() -> None:
    assert [size(text) for text in ("7", "2k", "1KiB", "3 MB", "1t")] == [7, 2048, 1024, 3 * 2**20, 2**40]
    assert cpus("0-2,5") == (0, 1, 2, 5)
    assert amount("R:4:1") == Amount("R", 4, 1)
    found = tracing(
        ["level=TENSORS", "level=TIMESTAMPS", "rate=5", "count=-1", "triton,file=f", "triton,log-frequency=3"]
    )
    assert (found.levels, found.rate, found.count, found.file, found.log_frequency) == (
        ("TIMESTAMPS", "TENSORS"), 5, -1, "f", 3,
    )  # fmt: skip
    assert tracing(["level=TENSORS", "level=OFF", "mode=triton"]).levels == ()


def test_example_request_is_small_and_json_serialisable() -> None:
    def config(*inputs: TensorSpec) -> ModelConfig:
        return ModelConfig("m", "python", max_batch=4, inputs=inputs)

    spec = TensorSpec("x", Datatype.INT32, (-1, 2))
    assert example_request(config(spec, TensorSpec("y", Datatype.FP16, (1,), optional=True))) == {
        "inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1, 2], "data": [1, 1]}]
    }
    assert example_request(config(TensorSpec("x", Datatype.FP16, (2,)))) is None
    assert example_request(config(TensorSpec("x", Datatype.FP32, (3, 224, 224)))) is None

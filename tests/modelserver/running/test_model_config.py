"""The configuration that a Python model receives equals the one that clients see."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.modelserver.models.rig import config, serving, tensor, write

from forebay.modelserver.repository import Rules

pytestmark = pytest.mark.slow
ONE = tensor("IN", [[1.0]])
TELLS = """
    @staticmethod
    def auto_complete_config(config):
        import json
        Path({seen!r}).write_text(json.dumps(config.as_dict()))
        {completes}
        return config

    def initialize(self, args):
        Path({file!r}).write_text(str(args["model_config"]))

    def execute(self, requests):
        return [give(get(request)) for request in requests]
"""
COMPLETES = """config.set_max_batch_size(16)
        config.add_input({"name": "MORE", "data_type": "TYPE_FP32", "dims": [-1], "optional": True})
        config.set_dynamic_batching()"""
QUEUES = """
dynamic_batching {
  preferred_batch_size: [2]
  priority_levels: 2
  default_priority_level: 1
  default_queue_policy { max_queue_size: 7 }
  priority_queue_policy { key: 1 value { max_queue_size: 3 } }
}
response_cache { enable: true }
metric_tags { key: "team" value: "rivers" }
optimization { eager_batching: true }
instance_group { name: "own" count: 1 kind: KIND_CPU rate_limiter { priority: 3 } }
model_warmup { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [1] zero_data: true } } }
"""
SEQUENCES = """
sequence_batching {
  direct { max_queue_delay_microseconds: 100 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  state { input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: [1] }
}
"""


@pytest.mark.parametrize(("more", "completes"), [(QUEUES, ""), (SEQUENCES, ""), ("", ""), ("", COMPLETES)])
def test_model_receives_the_configuration_that_clients_see(tmp_path: Path, more: str, completes: str) -> None:
    said, seen = tmp_path / "said", tmp_path / "seen"
    source = TELLS.format(file=str(said), seen=str(seen), completes=completes or "pass")
    models = write(tmp_path / "models", "m", config(more), source)

    async def main() -> dict[str, Any]:
        async with serving(models, startup=("m",)) as server:
            document: dict[str, Any] = dict(server.view("m", "").document)
            return document

    shown = asyncio.run(main())
    told, before = json.loads(said.read_text()), json.loads(seen.read_text())
    assert told == shown
    assert "model_transaction_policy" not in shown
    assert before.keys() - {"dynamic_batching"} == told.keys() - {"dynamic_batching"}
    if completes:
        assert (before["max_batch_size"], told["max_batch_size"]) == (8, 16)
        assert [each["optional"] for each in told["input"]] == [False, True]
    else:
        assert before == told


def test_model_does_not_complete_its_configuration_when_that_is_disabled(tmp_path: Path) -> None:
    said = tmp_path / "said"
    source = TELLS.format(file=str(said), seen="", completes="config.set_max_batch_size(1)")  # it is 8: an error
    models = write(tmp_path / "models", "m", config(), source)

    async def main() -> None:
        async with serving(models, startup=("m",), rules=Rules(auto_complete=False)) as server:
            assert await server.numbers("m", ONE) == [[1.0]]
            assert json.loads(said.read_text()) == dict(server.view("m", "").document)

    asyncio.run(main())


def test_model_receives_the_same_configuration_after_reload(tmp_path: Path) -> None:
    said, seen = tmp_path / "said", tmp_path / "seen"
    source = TELLS.format(file=str(said), seen=str(seen), completes=COMPLETES)
    models = write(tmp_path / "models", "m", config(), source)

    async def main() -> None:
        async with serving(models, startup=("m",)) as server:
            before = said.read_text()
            said.unlink()
            write(models, "m", config(), f"{source}\n# new")
            await server.load("m", {})
            assert said.read_text() == before

    asyncio.run(main())

"""What streams need of a model to drop frames: its concurrency, and where drops are counted; late requests; rest."""

import asyncio
from pathlib import Path
from time import monotonic

import pytest
from tests.modelserver.models.rig import IO, config, ensemble, serving, tensor, until, write

from forebay.core.serving.errors import Kind
from forebay.core.serving.values import InferRequest

pytestmark = pytest.mark.slow
THREE = "instance_group { count: 3 kind: KIND_CPU }"


def test_concurrency_of_a_model_is_its_instances_and_of_an_ensemble_their_sum(tmp_path: Path) -> None:
    write(tmp_path, "one", config())
    write(tmp_path, "three", config(THREE))
    steps = [("one", {"IN": "IN"}, {"OUT": "a"}), ("three", {"IN": "a"}, {"OUT": "b"})]
    again = [*steps, ("one", {"IN": "b"}, {"OUT": "OUT"})]
    ensemble(tmp_path, "all", again, f"max_batch_size: 8 {IO.format(dims='-1')}")
    ensemble(
        tmp_path, "few", again, f"max_batch_size: 8 {IO.format(dims='-1')}", scheduling="max_inflight_requests: 2"
    )

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            found = {name: server.view(name, "").abreast for name in ("one", "three", "all", "few")}
            assert found == {"one": 1, "three": 3, "all": 4, "few": 3}
            write(tmp_path, "one", config(THREE))
            await server.load("one", {})
            assert (server.view("one", "").abreast, server.view("all", "").abreast) == (3, 6)

    asyncio.run(main())


def test_dropped_request_counts_as_rejected(tmp_path: Path) -> None:
    write(tmp_path, "one", config())

    async def main() -> None:
        async with serving(tmp_path, startup=("one",)) as server:
            for name in ("one", "gone"):
                server.dropped(InferRequest(name, "", "", (tensor("IN", [[1.0]]),)))
            (counts,) = server.statistics("one", "")
            assert (counts.fail.count, counts.failures["REJECTED"], counts.success.count) == (1, 1, 0)

    asyncio.run(main())


def test_request_whose_deadline_has_passed_is_rejected_by_the_first_step_of_an_ensemble(tmp_path: Path) -> None:
    write(tmp_path, "one", config())
    steps = [("one", {"IN": "IN"}, {"OUT": "a"}), ("one", {"IN": "a"}, {"OUT": "OUT"})]
    ensemble(tmp_path, "both", steps, f"max_batch_size: 8 {IO.format(dims='-1')}")

    async def main() -> None:
        async with serving(tmp_path, startup=("both",)) as server, asyncio.timeout(60):
            late = await server.ask("both", tensor("IN", [[1.0]]), deadline=monotonic() - 1.0).error()
            assert late.kind is Kind.DEADLINE_EXCEEDED
            assert await server.numbers("both", tensor("IN", [[1.0]])) == [[1.0]]

    asyncio.run(main())


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_instances_without_requests_do_not_wake_each_other_for_a_resource(tmp_path: Path, strategy: str) -> None:
    group = 'instance_group { count: 4 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
    write(tmp_path, "m", config(f"{group} sequence_batching {{ {strategy} }}"))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",), limited=True) as server:
            ready = asyncio.get_running_loop().__dict__["_ready"]
            for _ in range(3):
                one = tensor("IN", [[1.0]])
                await server.numbers("m", one, sequence_id=1, sequence_start=True, sequence_end=True)
                await until("the event loop has nothing to do", lambda: not ready)

    asyncio.run(main())

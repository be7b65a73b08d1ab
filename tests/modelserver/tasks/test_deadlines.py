"""Deadlines and token counts of the task endpoints, which they share with all endpoints of a replica."""

from time import monotonic

import pytest
from tests.modelserver.tasks.rig import document, rig
from tests.net.rig import run

SEVERAL = {"model": "lengths", "input": ["a", "bb", "ccc"]}


def test_request_deadline_applies_to_all_its_inferences() -> None:
    async def main() -> None:
        async with rig() as it:
            before = monotonic()
            assert (await it.ask("/v1/embeddings", SEVERAL, x_forebay_deadline_ms="60000")).status == 200
            deadlines = [each.deadline for each in it.models.requests]
            assert len(deadlines) == 2
            assert all(before + 60 <= each <= monotonic() + 60 for each in deadlines)
            assert (await it.ask("/v1/embeddings", SEVERAL)).status == 200
            assert [each.deadline for each in it.models.requests[2:]] == [0, 0]

    run(main())


@pytest.mark.parametrize("given", ["-5", "x", "1.5", "9999999999"])
def test_an_invalid_deadline_is_rejected(given: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", SEVERAL, x_forebay_deadline_ms=given)
            error = document(answer)["error"]
            assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", "x-forebay-deadline-ms")
            assert (
                error["message"] == "'x-forebay-deadline-ms': expected an integer in milliseconds, at most 9 digits."
            )
            assert not it.models.requests

    run(main())


@pytest.mark.parametrize(("model", "usage"), [("lengths", b"6,0,0"), ("uncounted", b"0,0,0")])
def test_usage_header_matches_the_response_body(model: str, usage: bytes) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("/v1/embeddings", {**SEVERAL, "model": model})
            assert answer.headers[b"x-forebay-usage"] == usage
            assert document(answer)["usage"]["prompt_tokens"] == int(usage.split(b",")[0])
            answer = await it.ask("/v1/classify", {"model": "letters", "input": "abc"})
            assert answer.headers[b"x-forebay-usage"] == b"0,0,0"

    run(main())

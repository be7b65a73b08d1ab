"""What a worker says of its prefix cache: in the hashes of gateways, only changes, all of it after a loss."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.rig import Worker, until, worker

from forebay.core.model import BlockNews, LoadReport
from forebay.core.prefix.blocks import blocks
from forebay.wire.apis.request_fields import request_fields

pytestmark = pytest.mark.slow

LONG = "The history of the river and of all its mills. " * 40
TURN = [{"role": "user", "content": LONG}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 2}),
    "several choices": ("/v1/chat/completions", {"messages": [*TURN, *TURN], "max_tokens": 2, "n": 3}),
    "completion": ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    "a list of one": ("/v1/completions", {"prompt": [LONG], "max_tokens": 2}),
    "messages": ("/v1/messages", {"messages": TURN, "system": f"Be brief. {LONG}", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": LONG, "instructions": f"Be kind. {LONG}", "max_output_tokens": 2}),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("prefix")) as started:
        yield started.ready()


def news(of: Worker, since: object) -> BlockNews | None:
    """What it says has changed since a change."""
    answer = of.http.get(f"{of.url}/load?blocks_since={since}")
    return msgspec.json.decode(answer.content, type=LoadReport).blocks


def all_held(of: Worker) -> BlockNews:
    """What it says that it holds."""
    found = news(of, 0)
    assert found is not None
    assert found.reset
    return found


def post(of: Worker, path: str, fields: dict[str, Any], **headers: str) -> tuple[int, ...]:
    """Ask it; the blocks by which gateways know that prompt."""
    body = msgspec.json.encode({"model": "m", **fields})
    headers["content-type"] = "application/json"
    answer = of.http.post(f"{of.url}{path}", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return blocks(request_fields(body).text, "m")


@pytest.mark.parametrize(("path", "fields"), BODIES.values(), ids=BODIES)
def test_what_is_held_has_the_names_that_gateways_use(shared: Worker, path: str, fields: dict[str, Any]) -> None:
    before = all_held(shared)
    named = post(shared, path, fields)
    assert len(named) >= 3
    after = news(shared, before.seq)
    assert after is not None
    assert set(after.stored) == set(named) - set(before.stored)
    assert not after.reset
    assert not after.estimated
    assert not after.removed
    assert set(named) <= set(all_held(shared).stored)


def test_a_continued_stream_is_known_by_its_prompt(shared: Worker) -> None:
    fields = {"messages": [{"role": "user", "content": f"Go on. {LONG}"}], "max_tokens": 9, "stream": True}
    body = msgspec.json.encode({"model": "m", **fields})
    seam = {"x-forebay-continue": "chatcmpl-1,1,4", "x-forebay-gateway": "1"}
    answer = shared.http.post(f"{shared.url}/v1/chat/completions", content=body + b" the", headers=seam)
    assert answer.status_code == 200
    assert set(blocks(request_fields(body).text, "m")) <= set(all_held(shared).stored)


def test_the_tokens_of_a_known_beginning_are_reported_as_cached(shared: Worker) -> None:
    with shared.client() as client:
        usages = []
        for turns in ([f"Twice. {LONG}"], [f"Twice. {LONG}"], [f"Twice. {LONG}", "Again?"]):
            messages: Any = [{"role": "user", "content": turn} for turn in turns]
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=1)
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            usages.append((answer.usage.prompt_tokens, (details.cached_tokens or 0) if details else 0))
    (_, first), (whole, second), (_, third) = usages
    assert first == 0
    assert whole * 0.7 < second < whole
    assert second - 1 <= third <= whole


def test_what_is_no_prompt_of_one_sequence_has_no_names(shared: Worker) -> None:
    before = all_held(shared)
    post(shared, "/v1/completions", {"prompt": [LONG + "a", LONG + "b"], "max_tokens": 1})
    post(shared, "/v1/completions", {"prompt": "short", "max_tokens": 1})
    assert all_held(shared) == before


@pytest.mark.parametrize("since", ["", "x", "-1", "1.0", "9" * 30, "%31", "٣"])
def test_a_load_request_without_a_sequence_number_gets_the_load_only(shared: Worker, since: str) -> None:
    assert news(shared, since) is None
    assert shared.load().blocks is None


def test_what_is_pushed_out_is_removed_and_a_new_engine_holds_nothing(tmp_path: Path) -> None:
    with worker(tmp_path, settings={"kv_cache_tokens": 1024}) as small:
        small.ready()
        named = [post(small, "/v1/completions", {"prompt": f"{n} {LONG}", "max_tokens": 1}) for n in range(3)]
        held = all_held(small)
        assert set(named[2]) <= set(held.stored)
        assert not set(named[0]) & set(held.stored)
        more = post(small, "/v1/completions", {"prompt": f"4 {LONG}", "max_tokens": 1})
        change = news(small, held.seq)
        assert change is not None
        assert set(change.stored) == set(more)
        assert set(change.removed) == set(held.stored) - set(all_held(small).stored)
        assert change.removed

        pid = small.signal_engine(signal.SIGKILL)
        until("another engine", lambda: small.load().engine_pid not in (0, pid))
        small.ready()
        lost = news(small, change.seq)
        assert lost is not None
        assert lost.reset
        assert lost.stored == ()
        assert lost.seq > change.seq


def test_an_engine_that_says_nothing_of_its_cache_is_not_spoken_for(tmp_path: Path) -> None:
    with worker(tmp_path, task="embed") as embedding:
        embedding.ready()
        assert news(embedding, 0) is None

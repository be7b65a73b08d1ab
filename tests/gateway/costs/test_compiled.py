"""What the compiled request path still runs as Python: a function that is, costs as much as ten that are not."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.gateway.rig import ROUTES, Worker, chat, events, fronting, post, routes, working
from tests.gateway.test_keys import BEARER, RECORD
from tests.net.rig import peer, run

import forebay.gateway.gateway as gateway_module
from forebay.core.model import Policy, RecordsSpec, TenancySpec
from forebay.core.tenancy import Quota, Tenant
from forebay.net.server import Handler
from forebay.registry.keys import change_keys

pytestmark = pytest.mark.skipif(
    not str(gateway_module.__file__).endswith(".so"), reason="the gateway that is imported here is not compiled"
)
ASKED = 40
TEAM = Tenant("team", limits=Quota(requests_per_min=1 << 40, tokens_per_min=1 << 50))


def answer(exchange: Any) -> None:
    """As engines answer a request that is no stream, with the numbers of its tokens."""
    usage = b'"usage":{"prompt_tokens":10,"completion_tokens":20,"total_tokens":30}'
    exchange.respond(
        200, [(b"content-type", b"application/json"), (b"x-forebay-usage", b"10,20,0")], b'{"choices":[],%b}' % usage
    )


@pytest.mark.parametrize(("handler", "stream"), [(answer, False), (events, True)])
def test_request_path_runs_only_compiled_functions(tmp_path: Path, handler: Handler, stream: bool) -> None:
    seen: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        name, given = frame.f_code.co_filename, frame.f_locals
        made = ""  # of dataclasses and named tuples
        if name == "<string>":
            made = str(given["_cls"] if "_cls" in given else type(given.get("self")))
        if event == "call" and ("/forebay/" in name or "forebay." in made):
            seen[f"{name}:{frame.f_code.co_name} {made}"] += 1

    async def main() -> None:
        change_keys(tmp_path / "keys.json", lambda _: ((RECORD,), None))
        paths = (str(tmp_path / each) for each in ("keys.json", "counts.json", "leases.json"))
        more = {"tenancy": TenancySpec((TEAM,), *paths), "records": RecordsSpec(str(tmp_path / "records"))}
        worker, base = Worker(handler), replace(ROUTES, policy=Policy.CPR)
        async with working(worker), fronting(tmp_path, routes(worker, base=base), load_poll_s=60.0, **more) as front:
            await front.ready()
            request = post(chat(stream=stream), b"/v1/chat/completions", BEARER)
            async with peer(front.port) as client:
                for n in range(2 * ASKED):
                    if n == ASKED:  # by now everything has been seen once
                        sys.setprofile(look)
                    client.send(request)
                    assert (await client.answer()).status == 200
                sys.setprofile(None)

    try:
        run(main())
    finally:
        sys.setprofile(None)
    often = sorted(f"{count / ASKED:.1f} {name}" for name, count in seen.items() if count >= ASKED)
    assert not often, "\n".join(often)

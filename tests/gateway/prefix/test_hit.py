"""A decision record says how it is known that the chosen replica held a part of the prompt."""

from pathlib import Path

from tests.gateway.prefix.test_reports import AFFINITY, LONG, Telling, at_once, conversation
from tests.gateway.rig import cluster, post
from tests.net.rig import run, until

from forebay.cli.records.reading import RecordFiles
from forebay.core.model import RecordsSpec
from forebay.core.routing import Source


def test_prefix_hit_is_recorded_with_its_source(tmp_path: Path) -> None:
    root = tmp_path / "records"
    files = RecordFiles(root)

    async def main() -> None:
        worker, other = Telling(at_once), Telling(at_once, "chat-1")
        async with cluster(tmp_path, worker, other, base=AFFINITY, records=RecordsSpec(str(root))) as front:
            for id in (b"first", b"second"):
                answer = await front.ask(post(conversation(LONG), b"/v1/chat/completions", b"x-request-id: " + id))
                assert answer.status == 200
                await worker.told()
            await until(lambda: bool(files.decisions("second").decisions))

    run(main())
    hits = [files.decisions(id).decisions[0].hit for id in ("first", "second")]
    assert hits == ["", Source.EXACT]

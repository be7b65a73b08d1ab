"""Requests without a key cannot fill the disk."""

from pathlib import Path

import msgspec

from forebay.core.errors import Code
from forebay.gateway.records.audit import UNAUTHENTICATED_PER_MIN, AuditLog
from forebay.gateway.records.facts import NOTHING, Facts
from forebay.gateway.records.lines import Line
from forebay.gateway.records.verifying import verify
from forebay.wire.records import Decision


def facts(ts: float, code: str, tenant: str = "") -> Facts:
    line = Line("request", ts, "id", "/v1/chat/completions", "", 401, code, 0)
    return Facts(Decision(ts, "id", "", tenant, 401, code, 0.0), msgspec.json.encode(line), NOTHING)


def test_unauthenticated_requests_are_sampled_in_the_audit_log_and_all_counted(tmp_path: Path) -> None:
    log = AuditLog(1_000_000, 0, prompts=False)
    log.start(tmp_path)
    for minute in range(3):
        for n in range(5 * UNAUTHENTICATED_PER_MIN):
            log.add(
                facts(1000.0 + 60.0 * minute + 0.01 * n, (Code.UNAUTHORIZED, Code.NOT_FOUND, Code.BAD_HTTP)[n % 3])
            )
        log.add(facts(1000.0 + 60.0 * minute + 30.0, Code.MODEL_NOT_FOUND, "acme"))
        log.flush()
    log.close()
    lines = [msgspec.json.decode(line) for line in next(tmp_path.glob("audit-*")).read_bytes().splitlines()]
    assert sum(line["event"] == "request" and "tenant" not in line for line in lines) == 3 * UNAUTHENTICATED_PER_MIN
    assert sum(line.get("code") == Code.MODEL_NOT_FOUND for line in lines) == 3
    skipped = [line["lines"] for line in lines if line["event"] == "skipped"]
    assert sum(skipped) == 3 * 4 * UNAUTHENTICATED_PER_MIN
    assert len(skipped) == 3
    assert log.lost == 0
    report = verify(tmp_path)
    assert report.ok
    assert report.gaps == []

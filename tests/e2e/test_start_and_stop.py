"""Starting, stopping, crashing and restarting `forebay up`: what it prints and what it leaves behind."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.cluster import CHAT, EMBED, TEST_HOME, Cluster, alive, launch, running, wait_for, write_file

SYNTHETIC: dict[str, Any] = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic"}


def finish(cluster: Cluster, timeout_s: float = 90) -> tuple[int, str]:
    """Wait for `up` to end by itself."""
    try:
        code = cluster.process.wait(timeout_s)
    finally:
        cluster.kill()
    return code, cluster.said()


def up_with(folder: Path, models: list[dict[str, Any]], home: Path = TEST_HOME, **gateway: Any) -> Cluster:
    path = folder / "start.yaml"
    name = f"e2e-{folder.name}"[:60].strip("-_").replace("_", "-").lower()
    return launch(path, name, write_file(path, name, models, **gateway), home)


def test_ctrl_c_stops_all_processes(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-ctrl-c", [SYNTHETIC, EMBED]) as cluster:
        pids = cluster.pids()
        assert len(pids) >= 3
        code = cluster.stop()

    assert code == 0
    assert [p for p in pids if alive(p)] == []
    assert cluster.pids() == []


def test_ready_message_has_urls_and_a_working_curl_command(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-ready", [{**SYNTHETIC, "replicas": 2}]) as cluster:
        said = wait_for(
            "it says ready", lambda: "ready" in cluster.said() and "curl" in cluster.said() and cluster.said()
        )
        command = said[said.index("curl") :].split("\n\n")[0]
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)

    assert cluster.url in said
    assert cluster.admin in said
    assert answer.returncode == 0, answer.stderr
    assert '"choices"' in answer.stdout


def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    slow = {**SYNTHETIC, "engine": {"name": "synthetic", "step_ms": 20}}
    with running(tmp_path, "e2e-drain", [slow]) as cluster, cluster.client() as client:
        stream = client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "talk"}],
            max_tokens=150,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        cluster.process.send_signal(signal.SIGTERM)
        rest = list(chunks)

        assert rest[-1].choices[0].finish_reason == "length"
        assert len([c for c in rest if c.choices[0].delta.content]) > 100
        assert cluster.process.wait(60) == 0


def test_sigterm_to_a_real_worker_lets_its_streams_finish(demo: Cluster) -> None:
    victim = demo.ready_replicas("chat")[0]
    other = demo.ready_replicas("chat")[1]
    with demo.client() as client:
        streams = [
            iter(
                client.chat.completions.create(
                    model="chat",
                    messages=[{"role": "user", "content": f"Tell story {n}."}],
                    max_tokens=60,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
            )
            for n in range(4)
        ]
        for each in streams:
            next(each)
        os.kill(victim["pid"], signal.SIGTERM)
        for each in streams:
            assert list(each)[-1].choices[0].finish_reason == "length"
    wait_for("the other one serves", lambda: other["pid"] in [r["pid"] for r in demo.ready_replicas("chat")])
    demo.wait_ready(90)


def test_restarted_control_adopts_running_processes(tmp_path: Path) -> None:
    path = tmp_path / "adopt.yaml"
    ports = write_file(path, "e2e-adopt", [{**SYNTHETIC, "replicas": 2}])
    first = launch(path, "e2e-adopt", ports)
    try:
        first.wait_ready()
        before = {r["id"]: r["pid"] for r in first.replicas("chat")}
        gateway = first.status()["gateways"][0]["pid"]
        first.process.kill()
        first.process.wait()

        with first.client() as client:
            answer = client.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": "anyone there?"}], max_tokens=5
            )
        assert answer.choices

        second = launch(path, "e2e-adopt", ports)
        try:
            second.wait_ready()
            assert {r["id"]: r["pid"] for r in second.replicas("chat")} == before
            assert second.status()["gateways"][0]["pid"] == gateway
            assert second.stop() == 0
            assert second.pids() == []
        finally:
            second.stop()
    finally:
        first.kill()


def test_start_succeeds_after_all_processes_were_killed(tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    ports = write_file(path, "e2e-again", [SYNTHETIC])
    first = launch(path, "e2e-again", ports)
    first.wait_ready()
    first.kill()
    wait_for("all are gone", lambda: not first.pids())

    second = launch(path, "e2e-again", ports)
    try:
        second.wait_ready()
        assert second.stop() == 0
    finally:
        second.kill()


def test_a_second_up_names_the_running_process(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-twice", [SYNTHETIC]) as first:
        code, said = finish(launch(first.file, first.name, (first.gateway_port, first.admin_port)))

    assert code != 0
    assert str(first.process.pid) in said


def test_occupied_port_error_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "taken.yaml"
    ports = write_file(path, "e2e-taken", [SYNTHETIC])
    with socket.socket() as foreigner:
        foreigner.bind(("127.0.0.1", ports[0]))
        foreigner.listen()
        code, said = finish(launch(path, "e2e-taken", ports))

    assert code != 0
    assert str(ports[0]) in said
    assert "gateway.port" in said


def test_occupied_worker_ports_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "step.yaml"
    ports = write_file(path, "e2e-step", [SYNTHETIC])
    with socket.socket() as foreigner:
        foreigner.bind(("127.0.0.1", 0))
        foreigner.listen()
        taken = foreigner.getsockname()[1]
        path.write_text(path.read_text().replace("worker_port_first:", f"worker_port_first: {taken} #"))
        cluster = launch(path, "e2e-step", ports)
        try:
            cluster.wait_ready()
            assert str(taken) not in cluster.replicas("chat")[0]["url"]
        finally:
            cluster.stop()


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no such file"), (b"GGUF", "truncated"), (b"#!/bin/sh\necho hello\n" * 50, "not a usable GGUF")],
    ids=["missing", "truncated", "not a model"],
)
def test_invalid_model_file_is_reported_before_anything_starts(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    model = tmp_path / "model.gguf"
    if content is not None:
        model.write_bytes(content)
    code, said = finish(up_with(tmp_path, [{**CHAT, "source": str(model)}]))

    assert code != 0
    assert str(model) in said
    assert says in said
    assert "Traceback" not in said


def test_truncated_gguf_is_reported(tmp_path: Path) -> None:
    whole = next((TEST_HOME / "models").rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as source:
        cut.write_bytes(source.read(30_000_000))
    code, said = finish(up_with(tmp_path, [{**CHAT, "source": str(cut)}]))

    assert code != 0
    assert "truncated" in said
    assert "Traceback" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_during_conversion_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    whole = next((TEST_HOME / "models").rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    model = tmp_path / "model.gguf"
    shutil.copy(whole, model)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(small)], check=True)
    try:
        code, said = finish(up_with(tmp_path, [{**CHAT, "source": str(model)}], home=small))
        left = sum(p.stat().st_size for p in small.rglob("*") if p.is_file())
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)

    assert code != 0
    assert "space" in said
    assert str(small) in said
    assert "Traceback" not in said
    assert left < 1_000_000


def test_invalid_cluster_file_lists_every_problem_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "gateway: {port: 99999, prot: 1}\n"
        "models:\n"
        "  - {name: Chat!, task: chatt, source: x, engine: vlm, replicas: 0}\n"
        "  - {name: embed, task: embed}\n"
    )
    code, said = finish(launch(path, "e2e-bad", (1, 1)))

    assert code != 0
    for problem in ("gateway.port", "99999", "gateway.prot", "models[0].name", "chatt", "vlm", "replicas", "source"):
        assert problem in said
    assert not (TEST_HOME / "run" / "e2e-bad").exists()


def test_crash_looping_replica_backs_off_and_shows_its_last_output(tmp_path: Path) -> None:
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"\x08\x07" + b"not really an onnx model" * 1000)
    cluster = up_with(tmp_path, [SYNTHETIC, {**EMBED, "source": str(tmp_path)}])
    try:

        def looping() -> list[dict[str, Any]]:
            if cluster.process.poll() is not None:
                return [{"last_words": cluster.said()}]
            return [r for r in cluster.replicas("embed") if r["restarts"] >= 1 and r["last_words"]]

        seen = wait_for("the last words are reported", looping, 60)
        assert "onnx" in seen[0]["last_words"].lower()
    finally:
        cluster.stop()


def test_two_gateway_processes_share_a_port_and_aggregate_metrics(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-two", [SYNTHETIC], processes=2) as cluster:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for _ in range(40):
            assert httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
        assert len({g["pid"] for g in cluster.status()["gateways"]}) == 2

        def counted() -> bool:
            samples = cluster.metrics()
            return sum(v for k, v in samples.items() if k.startswith("forebay_requests_total{")) == 40

        wait_for("both processes are in one scrape", counted)

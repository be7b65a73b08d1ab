"""The README is correct: its commands run as printed against a running demo."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import CHAT, EMBED, REPO, TEST_HOME, Cluster, free_ports, running, wait_for

from forebay.cli.settings import FileText, parse_cluster

README = (REPO / "README.md").read_text()
ELSEWHERE = {
    "make up": "test_make_up_starts_the_documented_cluster",
    "make test": "CI: tests/tidy/test_packaging.py says that .ci/run is this command",
}
"""Commands of the README that are covered by something else than being run below."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def blocks(language: str) -> list[str]:
    return [block.strip() for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)]


COMMANDS = [block for block in blocks("bash") if block not in ELSEWHERE]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo on free ports."""
    models = [{**CHAT, "replicas": 2}, {**EMBED, "replicas": 1}]
    with running(tmp_path_factory.mktemp("readme"), "readme", models) as cluster:
        yield cluster


def here(text: str, cluster: Cluster) -> str:
    """A text of the README for this environment and these ports."""
    forebay = f"{sys.executable} -m forebay.cli.main"
    return text.replace("http://127.0.0.1:8080", cluster.url).replace(".venv/bin/forebay", forebay)


def environ(cluster: Cluster) -> dict[str, str]:
    return {
        **os.environ,
        "FOREBAY_HOME": str(TEST_HOME),
        "FOREBAY_URL": cluster.url,
        "FOREBAY_ADMIN_URL": cluster.admin,
        "FOREBAY_NAME": cluster.name,
        "FOREBAY_GATEWAY__PORT": str(cluster.gateway_port),
        "FOREBAY_ADMIN__PORT": str(cluster.admin_port),
        "NO_COLOR": "1",
    }


def test_readme_has_commands_and_those_tested_elsewhere_are_still_there() -> None:
    assert len(COMMANDS) >= 6
    assert set(ELSEWHERE) <= set(blocks("bash"))


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command_works_as_printed(command: str, demo: Cluster, tmp_path: Path) -> None:
    (tmp_path / "forebay.yaml").write_text(blocks("yaml")[0])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here(command, demo)],
        cwd=tmp_path,
        env=environ(demo),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert '"error"' not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("program", blocks("python"))
def test_readme_program_works_as_printed(program: str, demo: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(program, demo)], env=environ(demo), capture_output=True, text=True, timeout=180
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


@pytest.mark.parametrize("text", blocks("yaml"))
def test_readme_cluster_file_is_valid(text: str) -> None:
    assert parse_cluster(FileText("README.md", text.encode()), {}).models


def test_make_up_starts_the_documented_cluster(tmp_path: Path) -> None:
    if not (Path(sys.prefix) / ".installed").exists():
        pytest.skip("`make` did not make this environment, and must not change it")
    gateway_port, admin_port = free_ports(2)
    output = tmp_path / "up.out"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            ["make", "up", f"VENV={sys.prefix}"],
            cwd=REPO,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
                "FOREBAY_HOME": str(TEST_HOME),
                "FOREBAY_NAME": "readme-up",
                "FOREBAY_GATEWAY__PORT": str(gateway_port),
                "FOREBAY_ADMIN__PORT": str(admin_port),
                "NO_COLOR": "1",
            },
        )
    cluster = Cluster(tmp_path, TEST_HOME, "readme-up", gateway_port, admin_port, output, process)
    try:
        cluster.wait_ready()
        said = wait_for(
            "it says ready", lambda: "ready" in cluster.said() and "curl" in cluster.said() and cluster.said()
        )
        assert cluster.url in said
        assert "demo" in said
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        assert cluster.pids() == []
        assert "Traceback" not in cluster.said()
    finally:
        cluster.kill()

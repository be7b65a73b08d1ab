"""The commands of docs/rollouts.md work exactly as printed there."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e.cluster import REPO, TEST_HOME, Cluster
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import demo_gguf, serving, words

from forebay.wire.clusterfile import load_course

PAGE = (REPO / "docs" / "rollouts.md").read_text()
REVISION = "r-4c1f09aa"
"""As the page calls the new one."""
AT_ONCE = {"kind": "blue-green", "settle_s": 600.0}
"""Without traffic nothing could be decided by comparing."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(cluster: Cluster, line: str, folder: Path) -> str:
    """What a command of the page prints; one that watches is left with Ctrl-C as soon as it shows the rollout."""
    words = ["bash", "-c", "exec " + line.replace("forebay", f"{sys.executable} -m forebay.cli.main", 1)]
    environ = {**os.environ, "FOREBAY_HOME": str(TEST_HOME), "FOREBAY_ADMIN_URL": cluster.admin, "NO_COLOR": "1"}
    if "--watch" in line:
        return watch(words, {**environ, "TERM": "xterm"}, folder)
    done = subprocess.run(
        words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
    return done.stdout + done.stderr


def watch(words: list[str], environ: dict[str, str], folder: Path) -> str:
    """What a command shows in a terminal until it is left. Read to the end, as a full terminal holds it up.

    Ctrl-C means something to it also if the tests run in the background, where shells have it ignored.
    """
    ours, theirs = pty.openpty()
    words = ["env", "--default-signal=INT", *words]
    process = subprocess.Popen(words, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, interrupts, began = b"", 0, time.monotonic()
    try:
        with suppress(OSError):  # nobody has the terminal open any more
            while (passed_s := time.monotonic() - began) < 45:
                if select.select([ours], [], [], 1.0)[0]:
                    said += os.read(ours, 65_536)
                if b"chat:1" in said and passed_s > 10 * interrupts:  # again if it was in vain
                    interrupts += 1
                    process.send_signal(signal.SIGINT)
        assert interrupts, said
        assert process.wait(20) in (0, 130, -signal.SIGINT), said
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return said.decode()


def test_documented_commands_work_as_printed(tmp_path: Path) -> None:
    model = {"name": "chat", "task": "chat", "rollout": {"plan": AT_ONCE}}
    (tmp_path / "my-better-model.gguf").symlink_to(demo_gguf())
    with serving(tmp_path, "e2e-commands", model, lambda path: words(path, "chat", step_ms=2)) as cluster:
        (tmp_path / "forebay.yaml").symlink_to(cluster.file)
        said, revision = "", REVISION
        for line in blocks("sh")[0].splitlines():
            said = run(cluster, line.partition("#")[0].strip().replace(REVISION, revision), tmp_path)
            assert "Traceback" not in said
            if "registry add" in line:
                found = re.search(r"chat@(r-[0-9a-f]+)", said)
                assert found, said
                revision = found[1]
        assert rolling.standing(cluster, "chat:1")["paused"]
        run(cluster, "forebay rollout abort chat", tmp_path)
        assert revision in run(cluster, "forebay rollout history chat", tmp_path)


@pytest.mark.parametrize("text", [text for text in blocks("yaml") if "models:" not in text])
def test_documented_plan_files_are_valid(text: str) -> None:
    assert load_course(text, "the page").steps

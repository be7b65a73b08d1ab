"""What `forebay doctor` finds."""

import json
import os
import socket
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from forebay.cli.doctor import Check, State, check_disk, check_extra, check_gpu, check_port, memory_available


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_free_port_is_ok_and_occupied_port_names_process_and_setting(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        port = taken.getsockname()[1]
        taken.listen()
        found = check_port("gateway", host, port)

    assert found.state is State.MISSING
    assert f"process {os.getpid()}" in found.found
    assert found.advice == "stop that process, or change gateway.port or gateway.host"
    assert check_port("gateway", host, port).state is State.OK


def test_host_of_another_machine_is_not_taken_for_an_occupied_port() -> None:
    found = check_port("admin", "192.0.2.1", 8081)

    assert found.found == "192.0.2.1 is not an address of this machine"
    assert found.advice == "change admin.port or admin.host"


@pytest.mark.parametrize(
    ("meminfo", "cgroup", "available"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", None, 2048 * 1024),
        ("MemAvailable: 2048 kB\n", "1000\n", 1000),
        ("MemAvailable: 2048 kB\n", "max\n", 2048 * 1024),
        ("", None, None),
    ],
)
def test_available_memory_respects_the_container(meminfo: str, cgroup: str | None, available: int | None) -> None:
    assert memory_available(meminfo, cgroup) == available


def test_missing_library_has_an_installation_hint() -> None:
    found = check_extra("no-such-library-anywhere", "llm", "testing")

    assert found.state is State.WARN
    assert "forebay[llm]" in found.advice


def test_gpus_are_listed_with_the_backends_that_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_gpu() == Check("gpu", State.OK, "none seen; everything runs on CPU")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = check_gpu()
    assert found.found.startswith("GPU 0: NVIDIA H100 80GB HBM3; the model server computes with ")
    assert "python" in found.found
    assert (found.state is State.OK) == ("onnxruntime" in found.found and "pytorch" in found.found)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert check_gpu().found == "nvidia-smi does not answer"


def test_home_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for home in (tmp_path / "a", tmp_path / "a" / "b"):
        assert check_disk(home) == Check(
            "disk", State.MISSING, f"{tmp_path / 'a'} is not a folder", "set FOREBAY_HOME to a folder"
        )


def test_home_that_cannot_be_looked_up_is_reported(tmp_path: Path) -> None:
    home = tmp_path / ("a" * 300)
    advice = "set FOREBAY_HOME to a folder you may write to"
    assert check_disk(home) == Check("disk", State.MISSING, f"{home}: File name too long", advice)


def test_missing_home_folder_is_ok(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "a" / "b").state in (State.OK, State.WARN)


@pytest.mark.slow
def test_report_is_complete_and_available_as_json(run: Run) -> None:
    done = run("doctor", "--json", FOREBAY_GATEWAY__PORT="18080", FOREBAY_ADMIN__PORT="18081")
    document = json.loads(done.stdout)
    names = [check["name"] for check in document["checks"]]

    assert {"python", "cores", "memory", "disk", "port 18080", "port 18081", "open files", "gpu", "pip"} <= set(names)
    assert {"openvino-genai", "onnxruntime", "tokenizers", "xllamacpp", "matplotlib"} <= set(names)
    assert document["ok"] == all(check["state"] != "missing" for check in document["checks"])
    assert done.returncode == (0 if document["ok"] else 1)
    assert all(check["advice"] for check in document["checks"] if check["state"] != "ok")

"""GPUs, tested without any: visible devices, backends that can use them, and broken contexts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.contract.tensor.gpus import cuda

from forebay.core.serving.config import InstanceGroup, InstanceKind, ModelConfig
from forebay.engines.tensor import gpus
from forebay.engines.tensor.protocol import BackendFailed

MIXED = ModelConfig(
    "m", "pytorch", instances=(InstanceGroup(count=2), InstanceGroup(kind=InstanceKind.GPU, count=2, gpus=(0, 1)))
)


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A machine with two GPUs."""
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": " GPU-a, MIG-b"}, ("GPU-a", "MIG-b")),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, ("0",)),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(
    dev: Path, environment: dict[str, str], seen: tuple[str, ...]
) -> None:
    assert gpus.visible(environment, dev) == seen


def test_gpu_backends_are_detected_from_installed_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("torch/lib", "onnxruntime/capi"):
        (tmp_path / folder).mkdir(parents=True)
    for module in ("torch", "onnxruntime"):
        (tmp_path / module / "__init__.py").write_text("raise ImportError('nobody is to import this')")
    found = []
    for file in ("torch/lib/libtorch_cuda.so", "onnxruntime/capi/libonnxruntime_providers_cuda.so"):
        program = "from forebay.engines.tensor import gpus; print(sorted(gpus.computing()))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        found.append(subprocess.check_output([sys.executable, "-c", program], text=True, env=environment).strip())
        (tmp_path / file).touch()
    found.append(subprocess.check_output([sys.executable, "-c", program], text=True, env=environment).strip())
    assert found == ["['python']", "['python', 'pytorch']", "['onnxruntime', 'python', 'pytorch']"]


def test_instance_device_follows_its_group() -> None:
    assert [gpus.on_gpu(MIXED, each) for each in range(7)] == [False, False, True, True, True, True, True]


@pytest.mark.parametrize(("text", "share"), [("", None), ("0.5", 0.5), ("1", 1.0)])
def test_gpu_memory_fraction_is_parsed(text: str, share: float | None) -> None:
    assert gpus.memory_fraction(replace(MIXED, parameters={gpus.FRACTION: text})) == share


@pytest.mark.parametrize("text", ["half", "0", "-0.1", "1.01", "nan", "50%"])
def test_invalid_gpu_memory_fraction_is_rejected(text: str) -> None:
    with pytest.raises(BackendFailed, match="must be a number above 0 and up to 1"):
        gpus.memory_fraction(replace(MIXED, parameters={gpus.FRACTION: text}))


@pytest.mark.skipif(cuda.COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("answers", "broken"),
    [
        ({}, False),
        ({"STUB_QUERY": "600"}, False),  # not ready: it works on something
        ({"STUB_QUERY": "2"}, False),  # out of memory
        ({"STUB_QUERY": "710"}, True),  # an assertion of a kernel
        ({"STUB_QUERY": "700"}, True),
        ({"STUB_COUNT": "700"}, True),
        ({"STUB_COUNT": "3"}, False),  # not initialised: this process has not used it
    ],
)
def test_broken_gpu_context_is_detected_through_the_driver(
    tmp_path: Path, answers: dict[str, str], broken: bool
) -> None:
    assert call_with_driver(tmp_path, "gpus.broken()", answers, "ctypes.CDLL(library)") == broken


@pytest.mark.skipif(cuda.COMPILER is None, reason="needs a C compiler")
def test_process_without_cuda_has_no_broken_context(tmp_path: Path) -> None:
    assert call_with_driver(tmp_path, "gpus.broken()", {"STUB_QUERY": "700"}, "") is False


@pytest.mark.skipif(cuda.COMPILER is None, reason="needs a C compiler")
def test_memory_of_the_first_gpu_is_read_from_the_driver(tmp_path: Path) -> None:
    load = "ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)"
    assert call_with_driver(tmp_path, "gpus.memory_bytes()", {}, load) == 2**34
    with pytest.raises(subprocess.CalledProcessError) as raised:
        call_with_driver(tmp_path, "gpus.memory_bytes()", {"STUB_INIT": "100"}, load)
    assert "OSError: cuInit failed: 100" in raised.value.stderr


def call_with_driver(folder: Path, call: str, answers: dict[str, str], load: str) -> Any:
    """The result of a call in a process where the driver gives these answers."""
    library = cuda.build(folder)
    program = dedent(f"""
        import ctypes, json
        from forebay.engines.tensor import gpus
        library = {str(library)!r}
        {load}
        print(json.dumps({call}))
    """)
    environment = {**os.environ, **answers, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, env=environment, capture_output=True, check=True
    )
    return json.loads(done.stdout)

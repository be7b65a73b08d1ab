"""What all tensor backends have in common."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.tensor.models import CARRIES, TWO, ask, build, config, load, run, sample

from forebay.core.serving.config import MICRO_BATCH, Datatype, DynamicBatching
from forebay.engines.tensor import BACKENDS, create
from forebay.engines.tensor.measures import MICRO_BATCH_ROWS, Measuring
from forebay.engines.tensor.protocol import Array, Backend, BackendFailed

BACKEND_NAMES = ("onnxruntime", "openvino", "pytorch", "python")
FILES = {"onnxruntime": "model.onnx", "openvino": "model.xml", "pytorch": "model.pt2", "python": "model.py"}

SET = {MICRO_BATCH: "2"}

every_backend = pytest.mark.parametrize("name", BACKEND_NAMES)


def test_every_backend_is_in_this_suite() -> None:
    assert set(BACKEND_NAMES) == set(BACKENDS)


def test_unknown_backend_error_lists_available_ones() -> None:
    with pytest.raises(BackendFailed, match="'tensorrt' does not exist; choose one of onnxruntime, openvino, python"):
        create("tensorrt")


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("onnxruntime", "onnxruntime", "onnx"), ("openvino", "openvino", "llm"), ("pytorch", "torch", "torch")],
)
def test_missing_library_is_named_with_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, BACKENDS[name][0], raising=False)

    with pytest.raises(BackendFailed, match=rf"pip install 'forebay\[{extra}\]'"):
        create(name)


@pytest.fixture
def add_sub(name: str, tmp_path: Path) -> Iterator[Backend]:
    build(name, "add_sub", Datatype.FP32, tmp_path / "m" / "1")
    backend, _ = load(replace(config(name, Datatype.FP32, "add_sub"), instances=TWO), tmp_path / "m" / "1")
    yield backend
    backend.close()


@pytest.mark.parametrize(("name", "datatype"), [(name, each) for name in BACKEND_NAMES for each in CARRIES[name]])
def test_every_datatype_round_trips(name: str, datatype: Datatype, tmp_path: Path) -> None:
    build(name, "identity", datatype, tmp_path / "m" / "1")
    backend, loaded = load(config(name, datatype, "identity"), tmp_path / "m" / "1")
    given = sample(datatype, name)

    (response,) = run(backend, [ask({"X": given})])
    backend.close()

    assert response.error == ""
    found = response.outputs["Y"]
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    assert found.tolist() == given.tolist()
    assert found.flags.c_contiguous
    if loaded.inputs:
        assert [(each.name, each.datatype, each.dims) for each in loaded.inputs] == [("X", datatype, (-1, 4))]
        assert [(each.name, each.datatype, each.dims) for each in loaded.outputs] == [("Y", datatype, (-1, 4))]


def pair(rows: int, start: float) -> dict[str, Array]:
    a = np.arange(start, start + 4 * rows, dtype=np.float32).reshape(rows, 4)
    return {"A": a, "B": np.full_like(a, 2)}


@every_backend
def test_batched_results_equal_results_alone(name: str, add_sub: Backend) -> None:
    requests = [ask(pair(rows, 10.0 * rows)) for rows in (1, 3, 2)]

    together = run(add_sub, requests)
    alone = [run(add_sub, [request])[0] for request in requests]

    for one, other in zip(together, alone, strict=True):
        assert list(one.outputs) == list(other.outputs) == ["SUM", "DIFF"]
        for key in one.outputs:
            assert one.outputs[key].tolist() == other.outputs[key].tolist()


@every_backend
def test_only_requested_outputs_are_returned(name: str, add_sub: Backend) -> None:
    first, second, third = run(
        add_sub, [ask(pair(1, 0), "DIFF"), ask(pair(1, 0), "SUM"), ask(pair(1, 5), "DIFF", "SUM")]
    )

    assert [set(each.outputs) for each in (first, second, third)] == [{"DIFF"}, {"SUM"}, {"DIFF", "SUM"}]
    assert first.outputs["DIFF"].tolist() == [[-2, -1, 0, 1]]


@every_backend
def test_batch_without_rows_returns_no_rows(name: str, add_sub: Backend) -> None:
    (response,) = run(add_sub, [ask({key: value[:0] for key, value in pair(1, 0).items()})])

    assert response.error == ""
    assert response.outputs["SUM"].shape == (0, 4)


@every_backend
def test_read_only_inputs_are_accepted(name: str, add_sub: Backend) -> None:
    inputs = pair(2, 0)
    for array in inputs.values():
        array.flags.writeable = False

    (response,) = run(add_sub, [ask(inputs)])

    assert response.outputs["SUM"].tolist() == (inputs["A"] + 2).tolist()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "pytorch"])
def test_instances_run_concurrently_in_threads(name: str, add_sub: Backend) -> None:
    gate = threading.Barrier(2)
    wrong: list[str] = []

    def work(instance: int) -> None:
        gate.wait()
        for turn in range(50):
            inputs = pair(1 + turn % 3, 100.0 * instance + turn)
            (response,) = run(add_sub, [ask(inputs)], instance)
            if not np.array_equal(response.outputs["SUM"], inputs["A"] + 2):
                wrong.append(f"instance {instance}, turn {turn}: {response}")

    threads = [threading.Thread(target=work, args=(instance,)) for instance in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@every_backend
def test_invalid_request_does_not_fail_others_in_the_batch(name: str, add_sub: Backend) -> None:
    odd = {"A": np.ones((1, 4), np.float32), "B": np.ones((1, 3), np.float32)}
    good, bad, last = ask(pair(1, 0)), ask(odd), ask(pair(2, 7))

    if name == "python":  # here the model sees the batch: an exception of its own is the batch's
        responses = run(add_sub, [good, last])
        assert "operands could not be broadcast" in run(add_sub, [bad])[0].error
    else:
        first, wrong, second = run(add_sub, [good, bad, last])
        responses = [first, second]
        assert wrong.error != ""
        assert wrong.outputs == {}

    assert [each.error for each in responses] == ["", ""]


@every_backend
def test_missing_input_is_an_error(name: str, add_sub: Backend) -> None:
    (response,) = run(add_sub, [ask({"A": np.ones((1, 4), np.float32)})])

    assert response.error != ""
    if name not in ("python", "pytorch"):
        assert "B" in response.error


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "pytorch"])
def test_unknown_output_is_rejected(name: str, add_sub: Backend) -> None:
    wrong, good = run(add_sub, [ask(pair(1, 0), "NONE"), ask(pair(1, 0))])

    assert wrong.error == "unexpected inference output 'NONE'"
    assert good.error == ""


@every_backend
def test_missing_model_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=FILES[name].partition(".")[0]):
        load(config(name, Datatype.FP32, "add_sub"), tmp_path)


@every_backend
@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_corrupt_model_file_gives_a_short_error(name: str, damage: str, tmp_path: Path) -> None:
    build(name, "add_sub", Datatype.FP32, tmp_path / "m" / "1")
    file = tmp_path / "m" / "1" / FILES[name]
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) * 2 // 3], "garbage": b"\x00garbage\xff" * 100}[damage])

    if name == "python" and damage == "cut":
        pytest.skip("a part of a Python file may well be a Python file")
    with pytest.raises(BackendFailed, match=r"^model 'add_sub_") as caught:
        load(config(name, Datatype.FP32, "add_sub"), tmp_path / "m" / "1")
    assert len(str(caught.value)) < 1000


@every_backend
def test_closed_model_can_be_replaced_and_loaded_again(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    for _ in range(2):
        build(name, "add_sub", Datatype.FP32, folder)
        backend, _ = load(config(name, Datatype.FP32, "add_sub"), folder)
        assert run(backend, [ask(pair(1, 0))])[0].error == ""
        backend.close()
    build(name, "identity", Datatype.FP32, folder)
    backend, _ = load(config(name, Datatype.FP32, "identity"), folder)

    assert list(run(backend, [ask({"X": sample(Datatype.FP32)})])[0].outputs) == ["Y"]
    backend.close()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "pytorch"])
def test_backend_reports_how_many_rows_of_a_batch_it_runs_at_once(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m" / "7"
    build(name, "identity", Datatype.FP32, folder)
    settings = config(name, Datatype.FP32, "identity", batching=DynamicBatching())
    backend, loaded = load(settings, folder)
    assert isinstance(backend, Measuring)
    for _ in range(2):
        run(backend, [ask({"X": sample(Datatype.FP32)})] * 2)
    (family,) = backend.measured()
    backend.close()
    alone = [load(replace(settings, **changed), folder) for changed in ({"batching": None}, {"parameters": SET})]
    for other, _ in alone:
        other.close()

    assert (family.name, loaded.measures) == (MICRO_BATCH_ROWS, True)
    (series,) = family.series
    assert dict(series.labels) == {"model": settings.name, "version": "7", "row_bytes_below": "32"}
    assert series.value == 8  # six rows are a batch of up to eight, too short to cut
    assert [found.measures for _, found in alone] == [False, False]

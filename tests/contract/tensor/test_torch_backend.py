"""What is specific to PyTorch: TorchScript, matching of inputs and outputs, rejected files."""

import pickle
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.tensor.models import ask, config, load, run, spec

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.engines.tensor.arrays import VIEWED_BYTES_MIN
from forebay.engines.tensor.expressions import is_arithmetic
from forebay.engines.tensor.protocol import Array, BackendFailed, Response
from forebay.engines.tensor.torch import ALLOW_PICKLE, UNPACKED_BYTES_MAX

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.ones((2, 4), np.float32)


class AddSub(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Keyed(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"DIFF": x["A"] - x["B"], "SUM": x["A"] + x["B"]}


class Words(torch.nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return [each + "!" for each in x]


class Nested(torch.nn.Module):
    def forward(
        self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor
    ) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        return {"plain": pair["a"] * scale, "two": (pair["b"], pair["a"] + pair["b"])}


def script(module: torch.nn.Module, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the format is deprecated; Triton's users have it
        torch.jit.save(torch.jit.script(module), str(file))


def named(names: str, results: str, **changed: object) -> ModelConfig:
    """A configuration with these names."""
    made = {
        "inputs": tuple(spec(name, Datatype.FP32, 4) for name in names.split()),
        "outputs": tuple(spec(name, Datatype.FP32, 4) for name in results.split()),
    }
    return replace(config("pytorch", Datatype.FP32, "add_sub"), **(made | changed))  # type: ignore[arg-type]


def outputs(settings: ModelConfig, folder: Path, **inputs: Array) -> dict[str, list[object]]:
    backend, _ = load(settings, folder)
    (response,) = run(backend, [ask(inputs)])
    backend.close()
    assert response.error == ""
    return {name: array.tolist() for name, array in response.outputs.items()}


@pytest.mark.parametrize(
    ("inputs", "results"),
    [("a b", "SUM DIFF"), ("b a", "O__0 O__1"), ("X__0 X__1", "OUTPUT__0 OUTPUT__1"), ("first second", "SUM DIFF")],
)
def test_inputs_and_outputs_are_matched_as_in_triton(inputs: str, results: str, tmp_path: Path) -> None:
    script(AddSub(), tmp_path / "model.pt")
    names = inputs.split()
    values = dict(zip(sorted(names) if set(names) == {"a", "b"} else names, (A, B), strict=True))

    found = outputs(named(inputs, results), tmp_path, **values)

    assert list(found.values()) == [(A + B).tolist(), (A - B).tolist()]


def test_outputs_are_matched_by_index(tmp_path: Path) -> None:
    script(AddSub(), tmp_path / "model.pt")

    assert outputs(named("a b", "OUTPUT__1"), tmp_path, a=A, b=B) == {"OUTPUT__1": (A - B).tolist()}


def test_model_with_dict_inputs_and_outputs(tmp_path: Path) -> None:
    script(Keyed(), tmp_path / "model.pt")

    found = outputs(named("A B", "SUM DIFF"), tmp_path, A=A, B=B)

    assert found == {"SUM": (A + B).tolist(), "DIFF": (A - B).tolist()}


class Overwriting(torch.nn.Module):
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        x.sub_(1.0)
        return torch.gather(x, 1, place)


def test_failed_batch_of_a_model_that_writes_to_its_inputs_gives_no_wrong_answers(tmp_path: Path) -> None:
    script(Overwriting(), tmp_path / "model.pt")
    wide = VIEWED_BYTES_MIN
    backend, _ = load(
        named(
            "",
            "y",
            inputs=(spec("x", Datatype.FP32, wide), spec("place", Datatype.INT64, 1)),
            outputs=(spec("y", Datatype.FP32, 1),),
        ),
        tmp_path,
    )

    def batch(*places: int) -> list[Response]:
        x = np.full((len(places), wide), 5, np.float32)  # in one buffer, as requests that arrive together
        return run(backend, [ask({"x": x[i : i + 1], "place": np.array([[p]])}) for i, p in enumerate(places)])

    with pytest.raises(Exception, match="out of bounds"):
        batch(0, -1)
    for places in ((0, -1), (-1, 1, 2), (0,), (0, 1)):
        assert [each.outputs["y"].item() if each.outputs else None for each in batch(*places)] == [
            4 if place >= 0 else None for place in places
        ]
    backend.close()


class Optionals(torch.nn.Module):
    def forward(
        self, a: torch.Tensor | None = None, b: torch.Tensor | None = None, c: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros(2, 4)
        return (zero if a is None else a) - (zero if b is None else b), zero if c is None else c


@pytest.mark.parametrize("inputs", ["a b c", "b a c", "X__0 X__1 X__2", "first second third"])
def test_optional_input_that_is_absent_leaves_others_in_their_places(inputs: str, tmp_path: Path) -> None:
    script(Optionals(), tmp_path / "model.pt")
    optional = tuple(replace(spec(name, Datatype.FP32, 4), optional=True) for name in inputs.split())
    settings = named("", "O__0 O__1", inputs=optional)
    _, second, third = sorted(inputs.split()) if "a" in inputs.split() else inputs.split()

    assert list(outputs(settings, tmp_path, **{second: B}).values()) == [(-B).tolist(), (0 * B).tolist()]
    assert list(outputs(settings, tmp_path, **{third: B}).values()) == [(0 * B).tolist(), B.tolist()]


def test_arguments_that_are_not_configured_keep_their_defaults(tmp_path: Path) -> None:
    script(Optionals(), tmp_path / "model.pt")

    found = outputs(named("a c", "O__0 O__1"), tmp_path, a=A, c=B)

    assert list(found.values()) == [A.tolist(), B.tolist()]


def test_no_strings_are_an_output_too(tmp_path: Path) -> None:
    script(Words(), tmp_path / "model.pt")
    words = {"inputs": (spec("x", Datatype.BYTES, -1),), "outputs": (spec("y", Datatype.BYTES, -1),), "max_batch": 0}

    assert outputs(named("", "", **words), tmp_path, x=np.empty(0, object)) == {"y": []}


def test_strings_are_passed_as_a_list(tmp_path: Path) -> None:
    script(Words(), tmp_path / "model.pt")
    words = np.array([b"a", "é".encode()], object)
    settings = named(
        "", "", max_batch=0, inputs=(spec("x", Datatype.BYTES, -1),), outputs=(spec("Y", Datatype.BYTES, -1),)
    )

    assert outputs(settings, tmp_path, x=words) == {"Y": [b"a!", "é!".encode()]}
    backend, _ = load(settings, tmp_path)
    assert "strings in one dimension" in run(backend, [ask({"x": np.array([[b"a"] * 2] * 2, object)})])[0].error
    backend.close()


@pytest.mark.parametrize(
    ("inputs", "results"),
    [
        ("ARGS[0][a] ARGS[0][b] KWARGS[scale]", "RESULT[plain] RESULT[two][0] RESULT[two][1]"),
        ("INPUT__0 INPUT__1 INPUT__2", "OUTPUT__0 OUTPUT__1 OUTPUT__2"),
    ],
)
def test_nested_inputs_and_outputs_are_matched_by_path_or_index(inputs: str, results: str, tmp_path: Path) -> None:
    given = ({"a": torch.ones(2, 4), "b": torch.zeros(2, 4)},), {"scale": torch.ones(2, 4)}
    torch.export.save(torch.export.export(Nested(), *given), tmp_path / "model.pt2")
    values = dict(zip(inputs.split(), (A, B, B * 3), strict=True))

    found = outputs(named(inputs, results), tmp_path, **values)

    assert list(found.values()) == [(A * 3).tolist(), B.tolist(), (A + B).tolist()]


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("old", [False, True])
def test_pickle_is_never_loaded(old: bool, tmp_path: Path) -> None:
    torch.save(Evil(tmp_path / "mark"), tmp_path / "model.pt", _use_new_zipfile_serialization=not old)

    with pytest.raises(BackendFailed, match="it is a pickle, which runs code while it is read"):
        load(named("a b", "SUM DIFF"), tmp_path)
    assert not (tmp_path / "mark").exists()


def test_pickle_inside_an_export_is_never_loaded(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(AddSub(), (torch.ones(2, 4), torch.ones(2, 4))), tmp_path / "whole.pt2")
    pickled = tmp_path / "pickled"
    torch.save(Evil(tmp_path / "mark"), pickled)
    with zipfile.ZipFile(tmp_path / "whole.pt2") as whole, zipfile.ZipFile(tmp_path / "model.pt2", "w") as made:
        for name in whole.namelist():
            data = whole.read(name)
            if "sample_inputs" in name:
                data = pickled.read_bytes()
            made.writestr(name, data)

    with pytest.raises(BackendFailed, match="it holds a pickle of more than tensors, which would run code"):
        load(named("a b", "SUM DIFF"), tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("entry", ["data/aotinductor/model/wrapper.so", "data/constants/opaque_obj_0"])
def test_export_with_compiled_code_is_rejected(entry: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as made:
        made.writestr("model/archive_format", "pt2")
        made.writestr(f"model/{entry}", pickle.dumps(Evil(tmp_path / "mark")))

    with pytest.raises(BackendFailed, match=f"it holds {entry}, which is code"):
        load(named("a b", "SUM DIFF"), tmp_path)
    assert not (tmp_path / "mark").exists()


def test_pickled_module_is_loaded_when_the_operator_allows_it(tmp_path: Path) -> None:
    torch.save(AddSub(), tmp_path / "model.pt")
    allowed = {ALLOW_PICKLE: "true"}

    found = outputs(named("b a", "SUM DIFF", parameters=allowed), tmp_path, a=A, b=B)

    assert found == {"SUM": (A + B).tolist(), "DIFF": (A - B).tolist()}


def test_pickle_without_a_module_is_rejected(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")

    with pytest.raises(BackendFailed, match=r"model\.pt does not hold a module"):
        load(named("a b", "SUM DIFF", parameters={ALLOW_PICKLE: "true"}), tmp_path)


def test_zip_bomb_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("m/constants.pkl", b"")
        made.writestr("m/code/__torch__.py", b"")
        with made.open("m/data.pkl", "w") as entry:
            for _ in range((UNPACKED_BYTES_MAX >> 20) + 1):
                entry.write(bytes(1 << 20))
    with pytest.raises(BackendFailed, match="in compressed form"):
        load(named("a b", "SUM DIFF"), tmp_path)


def test_unrelated_archive_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as made:
        made.writestr("word/document.xml", "<x/>")

    with pytest.raises(BackendFailed, match="an archive, but not one of PyTorch"):
        load(named("a b", "SUM DIFF"), tmp_path)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (named("a b", "OUTPUT__5"), "output 'OUTPUT__5' is not among the 2 that the model has returned"),
        (
            named("a b", "", outputs=(spec("SUM", Datatype.FP64, 4),)),
            "gave output 'SUM' as FP32 [2, 4]; its configuration says FP64 [-1, 4]",
        ),
    ],
)
def test_outputs_that_contradict_the_configuration_are_errors(
    settings: ModelConfig, text: str, tmp_path: Path
) -> None:
    script(AddSub(), tmp_path / "model.pt")
    backend, _ = load(settings, tmp_path)

    (response,) = run(backend, [ask({"a": A, "b": B})])
    backend.close()

    assert text in response.error


def test_torchscript_requires_configured_inputs_and_outputs(tmp_path: Path) -> None:
    script(AddSub(), tmp_path / "model.pt")

    with pytest.raises(BackendFailed, match="the configuration must list them"):
        load(named("", ""), tmp_path)


class Mixed(torch.nn.Module):
    def forward(
        self, ids: torch.Tensor, pair: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return ids.sum(), {"double": pair["a"] * 2, "half": pair["b"].to(torch.float64) / 2}


def test_export_describes_its_inputs_and_outputs(tmp_path: Path) -> None:
    given = (
        torch.ones(3, 2, dtype=torch.int64),
        {"a": torch.ones(3, 4, dtype=torch.bfloat16), "b": torch.ones(3, 5)},
    )
    n = torch.export.Dim("n")
    shapes = ({0: n}, {"a": {0: n}, "b": {0: n, 1: torch.export.Dim("m")}})
    torch.export.save(torch.export.export(Mixed(), given, dynamic_shapes=shapes), tmp_path / "model.pt2")
    backend, loaded = load(named("", "", max_batch=8), tmp_path)

    assert loaded.inputs == (
        spec("ids", Datatype.INT64, -1, 2),
        spec("pair_a", Datatype.BF16, -1, 4),
        spec("pair_b", Datatype.FP32, -1, -1),
    )
    assert loaded.outputs == (
        spec("OUTPUT__0", Datatype.INT64),
        spec("OUTPUT__1", Datatype.BF16, -1, 4),
        spec("OUTPUT__2", Datatype.FP64, -1, -1),
    )
    ones = np.full((2, 4), 0x3F80, np.uint16)
    (response,) = run(
        backend, [ask({"pair_b": np.ones((2, 3), np.float32), "pair_a": ones, "ids": np.ones((2, 2), np.int64)})]
    )
    backend.close()
    assert response.error == ""
    assert response.outputs["OUTPUT__0"].item() == 4
    assert response.outputs["OUTPUT__1"].tolist() == [[0x4000] * 4] * 2
    assert response.outputs["OUTPUT__2"].tolist() == [[0.5] * 3] * 2


class Times(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, times: int, mask: torch.Tensor | None, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x * times - y, x


@pytest.mark.parametrize("inputs", ["", "x y", "A__0 A__1", "first second", "ARGS[0] ARGS[3]"])
def test_arguments_that_are_no_tensors_keep_the_values_of_the_export(inputs: str, tmp_path: Path) -> None:
    made = torch.export.export(Times(), (torch.ones(2, 4), 3, None, torch.ones(2, 4)))
    torch.export.save(made, tmp_path / "model.pt2")
    names = inputs.split() or ["x", "y"]

    found = outputs(named(inputs, "O__0 O__1" if inputs else ""), tmp_path, **dict(zip(names, (A, B), strict=True)))

    assert list(found.values()) == [(A * 3 - B).tolist(), A.tolist()]


def test_export_with_inputs_that_cannot_be_carried_is_rejected(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(AddSub(), (torch.ones(2) * 1j, torch.ones(2))), tmp_path / "model.pt2")

    with pytest.raises(BackendFailed, match="is not a tensor that the protocol can carry"):
        load(named("", ""), tmp_path)
    with pytest.raises(BackendFailed, match="the configuration must list them"):
        load(named("x", ""), tmp_path)


@pytest.mark.parametrize(
    ("word", "inferring"), [("", True), ("1", True), ("on", True), ("0", False), ("False", False)]
)
def test_switches_may_be_words_or_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, inferring: bool
) -> None:
    script(AddSub(), tmp_path / "model.pt")
    parameters = {"INFERENCE_MODE": word} if word else {}
    used: list[str] = []
    real = torch.inference_mode
    monkeypatch.setattr(torch, "inference_mode", lambda: (used.append(word), real())[1])

    outputs(named("a b", "SUM DIFF", parameters=parameters), tmp_path, a=A, b=B)

    assert bool(used) == inferring


def test_options_are_accepted_and_validated(tmp_path: Path) -> None:
    script(AddSub(), tmp_path / "model.pt")
    parameters = {"INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true", "INTRA_OP_THREAD_COUNT": "1"}

    found = outputs(named("a b", "SUM DIFF", parameters=parameters), tmp_path, a=A, b=B)

    assert found["SUM"] == (A + B).tolist()
    assert torch.get_num_threads() == 1
    with pytest.raises(BackendFailed, match="NUM_THREADS is 'all'; it must be a whole number"):
        load(named("a b", "SUM DIFF", parameters={"NUM_THREADS": "all"}), tmp_path)


@pytest.mark.parametrize(
    "text",
    ["Symbol('s17', positive=True, integer=True)", "Mul(Integer(2), Symbol('s0'))", "s0 + 1", "Max(1, s0//2)", "-1",
     "FloorDiv(s0, 2)", "Eq(Mod(s0, 8), 0)", "Float('0.5', precision=53)", "2*s0**2"],
)  # fmt: skip
def test_arithmetic_is_allowed(text: str) -> None:
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('x')", "s0 + open('/x')", "sympify('x')", "Max('exit()')", "Symbol('a b()')",
     "().__class__", "s0.__class__", "(lambda: 1)()", "[s0][0]", "lambdify(1, 2)", "1 #\n",
     "Symbol(Max('exit()'))", "f'{s0}'", "("],
)  # fmt: skip
def test_code_is_not_arithmetic(text: str) -> None:
    assert not is_arithmetic(text)


def test_a_program_with_code_as_a_size_is_rejected_without_running_it(tmp_path: Path) -> None:
    program = torch.export.export(Double(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    torch.export.save(program, tmp_path / "whole.pt2")
    folder = tmp_path / "1"
    folder.mkdir()
    code = f"__import__('pathlib').Path('{tmp_path / 'ran'}').touch()"
    with zipfile.ZipFile(tmp_path / "whole.pt2") as whole, zipfile.ZipFile(folder / "model.pt2", "w") as changed:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("models/model.json"):
                start = content.index(b"Symbol('")
                content = content.replace(content[start : content.index(b")", start) + 1], code.encode())
            changed.writestr(name, content)

    with pytest.raises(BackendFailed, match="which would run code"):
        load(config("pytorch", Datatype.FP32, "identity"), folder)
    assert not (tmp_path / "ran").exists()

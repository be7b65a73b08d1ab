"""The engine contract over every adapter; the real ones run real models."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.engine_contract import EmbedContract, GenerateContract, Subject, cosine
from tests.contract.resume_contract import ResumeContract
from tests.contract.token_contract import PromptContract, TokenContract

from forebay import engines
from forebay.core.errors import Refusal
from forebay.core.model import Task
from forebay.engines.prepare import prepare
from forebay.engines.protocol import Embed, Embedded, EngineBroken
from forebay.engines.synthetic.model import VOCABULARY, encode

TEXT = "Once upon a time"


def _slow(*names: str) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for name in names]


GENERATING = ["synthetic", *_slow("openvino", "llamacpp")]
EMBEDDING = ["synthetic", *_slow("onnx")]


def _synthetic(task: Task, **settings: int | float) -> Subject:
    engine = engines.create("synthetic", "", {"task": task.value, **settings})
    return Subject(engine, engine.load(), {TEXT: encode(TEXT)}, VOCABULARY, batch_invariant=True)


def _smollm2(name: str, gguf: Path, home: Path, **settings: int | float) -> Subject:
    artifact = prepare(name, gguf, {}, home / "cache", lambda stage, done, total: None)
    engine = engines.create(name, str(artifact), {"threads": 1, "kv_cache_tokens": 16_384, **settings})
    ids = {TEXT: (6403, 1980, 253, 655)}
    return Subject(engine, engine.load(), ids, vocabulary=49_152, virtual_time=False)


def _generating(name: str, request: pytest.FixtureRequest, **settings: int | float) -> Subject:
    if name == "synthetic":
        return _synthetic(Task.CHAT, **settings)
    gguf, home = request.getfixturevalue("smollm2_gguf"), request.getfixturevalue("model_home")
    return _smollm2(name, gguf, home, **settings)


@pytest.fixture(scope="module", params=GENERATING)
def generator(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with closing(_generating(request.param, request)) as subject:
        yield subject


@pytest.fixture(scope="module", params=GENERATING)
def small_generator(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with closing(_generating(request.param, request, concurrency=2)) as subject:
        yield subject


@pytest.fixture(scope="module", params=EMBEDDING)
def embedder(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "synthetic":
        subject = _synthetic(Task.EMBED)
    else:
        engine = engines.create("onnx", str(request.getfixturevalue("bge_small")), {"threads": 2})
        # The model is int8 with one activation scale for a whole batch: mates move a vector a little in any runtime.
        subject = Subject(
            engine,
            engine.load(),
            {TEXT: (101, 2320, 2588, 1037, 2051, 102)},
            vocabulary=30_522,
            batch_cosine_min=0.99,
        )
    with closing(subject):
        yield subject


class TestGenerate(GenerateContract):
    @pytest.fixture
    def subject(self, generator: Subject) -> Subject:
        return generator.fresh()

    @pytest.fixture
    def small(self, small_generator: Subject) -> Subject:
        return small_generator.fresh()


class TestResume(ResumeContract):
    @pytest.fixture
    def subject(self, generator: Subject) -> Subject:
        return generator.fresh()


class TestTokensOfGenerators(TokenContract, PromptContract):
    @pytest.fixture
    def subject(self, generator: Subject) -> Subject:
        return generator.fresh()


class TestTokensOfEmbedders(TokenContract):
    @pytest.fixture
    def subject(self, embedder: Subject) -> Subject:
        return embedder.fresh()


class TestEmbed(EmbedContract):
    @pytest.fixture
    def subject(self, embedder: Subject) -> Subject:
        return embedder.fresh()


def test_every_adapter_runs_through_the_contract() -> None:
    folder = Path(engines.__file__).parent
    files = {each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()}
    files.discard("protocol")
    covered = {each if isinstance(each, str) else each.values[0] for each in (*GENERATING, *EMBEDDING)}
    adapters = {name for name in files if "(self, now: float) -> Step" in _source(folder, name)}
    assert adapters == set(engines.ADAPTERS) == covered


def _source(folder: Path, name: str) -> str:
    parts = [folder / f"{name}.py", *(folder / name).glob("*.py")]
    return "".join(each.read_text() for each in parts if each.is_file())


@pytest.mark.slow
def test_batch_size_shrinks_for_long_inputs(bge_small: Path) -> None:
    with closing(engines.create("onnx", str(bge_small), {"threads": 1})) as engine:
        engine.load()
        for at in range(32):
            engine.add(Embed(str(at), tuple(range(1000, 1100))), 0.0)
        sizes = [len(engine.step(1.0).events) for _ in range(8)]
        assert sizes == [4] * 8  # 100 tokens count as 105, their bucket's longest; 512 for a thread
        assert engine.step(1.0).wait_s is None


@pytest.mark.slow
def test_text_without_tokens_is_rejected(bge_small: Path, tmp_path: Path) -> None:
    shutil.copytree(bge_small, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((bge_small / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    with closing(engines.create("onnx", str(tmp_path), {"threads": 1})) as engine:
        engine.load()
        with pytest.raises(Refusal, match="at least one token"):
            engine.add(Embed("a", " "), 0.0)


@pytest.mark.slow
def test_id_reused_during_its_cancelled_input_gets_its_own_vector(bge_small: Path) -> None:
    with closing(engines.create("onnx", str(bge_small), {"threads": 1})) as engine:
        engine.load()
        engine.add(Embed("a", tuple(range(1000, 1010))), 0.0)
        engine.add(Embed("b", tuple(range(1000, 1050))), 0.0)
        step = engine.step(1.0)
        assert [event.id for event in step.events] == ["a"]
        assert (step.load.running, step.load.waiting, step.wait_s) == (1, 0, 0.0)
        engine.cancel("b")
        engine.add(Embed("b", tuple(range(1000, 1020))), 1.0)
        ended = [event for _ in range(2) for event in engine.step(2.0).events]
        assert [(event.id, event.prompt_tokens) for event in ended if isinstance(event, Embedded)] == [("b", 20)]


@pytest.mark.slow
def test_more_inputs_than_may_wait_are_rejected_by_the_name_of_the_setting(bge_small: Path) -> None:
    with closing(engines.create("onnx", str(bge_small), {"threads": 1, "queue_max": 2})) as engine:
        engine.load()
        for n in range(2):
            engine.add(Embed(str(n), "an input of the same request"), 0.0)
        with pytest.raises(Refusal, match=r"at most 2 may wait for a batch \(engine\.queue_max\)"):
            engine.add(Embed("2", "an input of the same request"), 0.0)


def test_unknown_engine_error_lists_known_ones() -> None:
    with pytest.raises(EngineBroken, match=r"'nope' does not exist.*onnx.*synthetic"):
        engines.create("nope", "", {})


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forebay.engines.onnx", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineBroken, match=r"pip install 'forebay\[onnx\]'"):
        engines.create("onnx", "", {})


def test_the_engine_is_chosen_from_the_artifact(tmp_path: Path) -> None:
    for name, content in (("ir/openvino_model.xml", "x"), ("emb/model.onnx", "x"), ("a.GGUF", "x"), ("b.onnx", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert engines.choose_engine(tmp_path / "ir") == "openvino"
    assert engines.choose_engine(tmp_path / "emb") == "onnx"
    assert engines.choose_engine(tmp_path / "a.GGUF") in {"openvino", "llamacpp"}
    assert engines.choose_engine(tmp_path / "b.onnx") == "onnx"
    with pytest.raises(EngineBroken, match=r"expected a folder with openvino_model\.xml"):
        engines.choose_engine(tmp_path)


@pytest.mark.slow
def test_corrupt_embedding_model_is_named_at_load(bge_small: Path, tmp_path: Path) -> None:
    broken = {"missing": None, "truncated": -1000, "empty": 0}
    for name, end in broken.items():
        folder = tmp_path / name
        shutil.copytree(bge_small, folder)
        model = folder / "model.onnx"
        content = model.read_bytes()
        model.unlink()
        if end is not None:
            model.write_bytes(content[:end])
        with pytest.raises(EngineBroken, match=r"model\.onnx"):
            engines.create("onnx", str(folder), {}).load()


@pytest.mark.slow
def test_embedding_similarity_reflects_meaning(bge_small: Path) -> None:
    engine = engines.create("onnx", str(bge_small), {"max_delay_ms": 0, "threads": 2})
    subject = Subject(engine, engine.load(), {}, vocabulary=0)
    with closing(subject):
        eating, bread, cheetah = (
            subject.run_embed(text)
            for text in (
                "A man is eating food.",
                "A man is eating a piece of bread.",
                "A cheetah is running behind its prey.",
            )
        )
    assert cosine(eating, bread) == pytest.approx(0.84, abs=0.02)
    assert cosine(eating, cheetah) == pytest.approx(0.47, abs=0.02)

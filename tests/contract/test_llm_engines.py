"""What OpenVINO and llama.cpp must do beyond the contract, with the demo model: fidelity, templates, KV, schemas."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import openvino_genai as genai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tests.contract.engine_contract import GREEDY, Subject, finished, sampling
from tests.contract.llm_reference import Reference
from tests.engines.schema_strategy import schemas

from forebay import engines
from forebay.core.errors import Code, Refusal
from forebay.engines.prepare import prepare
from forebay.engines.protocol import EngineBroken, Generate
from forebay.engines.text import render_chat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PASSAGE = (
    "Hydroelectric power is one of the oldest ways of making electricity. Water is held back by a dam, and when it "
    "is released it falls through a pipe onto the blades of a turbine. The turbine turns a generator, which "
    "makes electric current. Because rivers rise and fall with the seasons, engineers build a pool in front of the "
    "turbines, called a forebay, which takes in whatever the river brings and gives the machines a steady flow."
)
AGREEMENT_MIN = 0.94
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "é 🌊 <b>&amp;</b> 'quoted' \"text\"\n\n  indented"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ not a template }} {% nor this %}"},
    ],
]


def loaded(name: str, artifact: Path, **changes: Any) -> Subject:
    engine = engines.create(name, str(artifact), {"threads": 1, "kv_cache_tokens": 8192, **changes})
    return Subject(engine, engine.load(), {}, vocabulary=49_152, virtual_time=False)


@pytest.fixture(scope="module")
def converted(smollm2_gguf: Path, model_home: Path) -> Path:
    return prepare("openvino", smollm2_gguf, {}, model_home / "cache", lambda stage, done, total: None)


@pytest.fixture(scope="module")
def openvino(converted: Path) -> Iterator[Subject]:
    with closing(loaded("openvino", converted)) as subject:
        yield subject


@pytest.fixture(scope="module", params=["openvino", "llamacpp"])
def either(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[Subject]:
    if request.param == "openvino":
        yield request.getfixturevalue("openvino")
    else:
        with closing(loaded("llamacpp", smollm2_gguf)) as subject:
            yield subject


@pytest.fixture(scope="module")
def expected(smollm2_gguf: Path, openvino: Subject) -> tuple[list[int], list[bytes]]:
    """The tokens of the passage, and what the reference takes for the likeliest token after each."""
    tokenizer = genai.Tokenizer(str(smollm2_gguf))
    ids = tokenizer.encode(PASSAGE, add_special_tokens=False).input_ids.data[0].tolist()
    reference = Reference.load(smollm2_gguf)
    return ids, [reference.tokens[row.argmax()] for row in reference.logits(ids)]


def likeliest(subject: Subject, prompts: list[list[int]]) -> list[tuple[bytes, float]]:
    """The first token of each prompt's greedy answer, and its log-probability."""
    one = sampling(max_tokens=1, logprobs=0, ignore_eos=True)
    ids = []
    for number, prompt in enumerate(prompts):
        ids.append(subject.generate(tuple(prompt), one))
        if number % 8 == 7:
            subject.drain()
    subject.drain()
    first = [subject.outcomes[id].logprobs[0] for id in ids]
    return [(bytes(each.bytes), each.logprob) for each in first]


def agreement(subject: Subject, expected: tuple[list[int], list[bytes]]) -> float:
    ids, wanted = expected
    got = likeliest(subject.fresh(), [ids[:end] for end in range(1, len(ids) + 1)])
    return sum(mine == want for (mine, _), want in zip(got, wanted, strict=True)) / len(wanted)


@pytest.fixture(scope="module")
def openvino_agreement(openvino: Subject, expected: tuple[list[int], list[bytes]]) -> float:
    return agreement(openvino, expected)


def test_top_1_tokens_agree_with_the_f32_reference(
    either: Subject, openvino_agreement: float, expected: tuple[list[int], list[bytes]]
) -> None:
    share = openvino_agreement if either.info.engine == "openvino" else agreement(either, expected)
    print(f"{either.info.engine}: top-1 agreement with float32 over {len(expected[1])} tokens: {share:.3f}")
    assert share >= AGREEMENT_MIN


def test_openvino_agrees_less_without_the_q4_1_conversion(
    smollm2_gguf: Path, openvino_agreement: float, expected: tuple[list[int], list[bytes]]
) -> None:
    with closing(loaded("openvino", smollm2_gguf)) as raw:
        share = agreement(raw, expected)
    print(f"openvino, Q4_1 as it is: top-1 agreement with float32: {share:.3f}")
    assert share < openvino_agreement


def test_openvino_output_equals_the_plain_pipeline(openvino: Subject, converted: Path) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    pipeline = genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
    config = genai.GenerationConfig(max_new_tokens=24, do_sample=False, apply_chat_template=False)
    for prompt in (
        "The capital of France is",
        "🌊 Write: 日本",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ):
        alone = pipeline.generate(prompt, config)[0].m_generation_ids[0]
        said = openvino.run(prompt, sampling(max_tokens=24)).text
        assert said.removesuffix("\N{REPLACEMENT CHARACTER}") == alone  # alone, it drops an unfinished character


def test_chat_prompts_match_the_tokenizer_template(openvino: Subject, converted: Path) -> None:
    tokenizer = genai.Tokenizer(str(converted))
    assert openvino.info.chat_template is not None
    for chat in CHATS:
        mine = render_chat(openvino.info.chat_template, chat, openvino.info.special_tokens)
        assert mine == tokenizer.apply_chat_template(chat, add_generation_prompt=True)


def test_chat_completion_is_sensible(either: Subject) -> None:
    prompt = render_chat(str(either.info.chat_template), CHATS[0], either.info.special_tokens)
    outcome = either.fresh().run(prompt, sampling(max_tokens=40))
    assert "Paris" in outcome.text
    assert "<|im_end|>" not in outcome.text
    assert finished(outcome).reason == "stop"


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schemas())
def test_accepted_schemas_never_break_the_engine(either: Subject, schema: Any) -> None:
    prompt, wanted = "As JSON: ", sampling(max_tokens=16, schema=json.dumps(schema))
    try:
        outcome = either.fresh().run(prompt, wanted)
    except Refusal:
        return
    if finished(outcome).reason == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(outcome.text))
    assert outcome.failed is None


def test_json_object_begins_an_object(either: Subject) -> None:
    outcome = either.fresh().run("A JSON object: ", sampling(max_tokens=20, schema='{"type": "object"}'))
    assert outcome.text.startswith("{")


def test_cancelling_frees_the_kv_cache_by_the_next_step(openvino: Subject) -> None:
    subject = openvino.fresh()
    long, other = (
        subject.generate(tuple(range(first, first + 320)), sampling(max_tokens=60, ignore_eos=True))
        for first in (100, 900)
    )
    subject.step_until("both speak", lambda: all(subject.outcomes[id].deltas for id in (long, other)))
    assert (subject.load.kv_used_tokens or 0) >= 640
    subject.cancel(long)
    subject.step()  # freed at its end: the figures are those of its beginning
    subject.step()
    assert subject.load.kv_used_tokens is not None
    assert 320 <= subject.load.kv_used_tokens <= 448
    subject.drain()


def test_more_requests_than_the_kv_cache_holds_all_finish(converted: Path) -> None:
    with closing(loaded("openvino", converted, kv_cache_tokens=512)) as subject:
        ids = [
            subject.generate(tuple(range(n * 300, n * 300 + 200)), sampling(max_tokens=40, ignore_eos=True))
            for n in range(1, 7)
        ]
        subject.drain()
        assert [finished(subject.outcomes[id]).completion_tokens for id in ids] == [40] * 6
        assert subject.info.context_tokens == 512
        subject.assert_idle()


def test_shared_prefix_does_not_mix_concurrent_outputs(converted: Path) -> None:
    """OpenVINO lets requests that continue the same earlier prompt write into one block; the adapter does not."""
    prefix = list(range(1000, 1075))  # ends in the middle of a block
    prompts = [prefix + list(range(first, first + 6)) for first in (5000, 6000, 7000, 8000)]
    with closing(loaded("openvino", converted, prefix_cache=False)) as plain:
        alone = likeliest(plain, prompts)
    with closing(loaded("openvino", converted)) as caching:
        likeliest(caching, [prefix])
        together = likeliest(caching, prompts)
    for (_, mine), (_, wanted) in zip(together, alone, strict=True):
        assert mine == pytest.approx(wanted, abs=0.2)


def test_repeated_prompt_is_read_from_the_prefix_cache(smollm2_gguf: Path) -> None:
    prompt = tuple(range(500, 800))
    with closing(loaded("llamacpp", smollm2_gguf)) as subject:
        cold, warm = (finished(subject.run(prompt, sampling(max_tokens=2))) for _ in range(2))
    assert cold.cached_tokens is not None
    assert warm.cached_tokens is not None
    assert cold.cached_tokens < 20
    assert warm.cached_tokens >= 250


def test_llamacpp_frees_the_slot_of_a_cancelled_request(smollm2_gguf: Path) -> None:
    with closing(loaded("llamacpp", smollm2_gguf, concurrency=1)) as subject:
        long = subject.generate(tuple(range(500, 1100)), sampling(max_tokens=5000, ignore_eos=True))
        subject.step()
        subject.cancel(long)
        outcome = subject.run("The capital of France is", sampling(max_tokens=4))
        assert finished(outcome).completion_tokens == 4
        subject.assert_idle()


@pytest.mark.parametrize("name", ["openvino", "llamacpp"])
def test_corrupt_model_is_named_at_load(name: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    whole = smollm2_gguf.read_bytes()
    broken = {
        "missing.gguf": None,
        "empty.gguf": b"",
        "half.gguf": whole[: len(whole) // 2],
        "header.gguf": whole[:10_000],
        "text.gguf": b"not a model at all",
    }
    for file, content in broken.items():
        path = tmp_path / file
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(EngineBroken, match=file):
            engines.create(name, str(path), {}).load()
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(EngineBroken, match="folder"):
        engines.create(name, str(folder), {}).load()


def test_seeds_are_reproducible_and_distinct(either: Subject) -> None:
    subject = either.fresh()
    free = {"temperature": 1.0, "max_tokens": 16}
    texts = [subject.run("Once upon a time", sampling(seed=seed, **free)).text for seed in (1, 1, 2, 2**62, -1)]
    unseeded = {subject.run("Once upon a time", sampling(**free)).text for _ in range(3)}
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4
    assert len(unseeded) > 1


@pytest.mark.parametrize(
    ("said", "changes"), [(" <|im_end|> is a special token", {}), (" a time", {"presence_penalty": 1.0})]
)
def test_openvino_rejects_unfaithful_resumes_and_llamacpp_resumes(
    either: Subject, said: str, changes: dict[str, float]
) -> None:
    work = Generate("resumed", "Once upon", sampling(max_tokens=20, ignore_eos=True, **changes), said)
    if either.fresh().info.engine == "openvino":
        assert either.refuses(work).code is Code.NOT_RESUMABLE
        return
    either.add(work)
    either.drain()
    assert finished(either.outcomes["resumed"]).completion_tokens == 20


def test_resumed_output_reports_at_most_its_prompt_as_cached(smollm2_gguf: Path) -> None:
    said = " and the river runs down to the sea, where the water is salt and the wind is cold," * 6
    with closing(loaded("llamacpp", smollm2_gguf)) as subject:
        for _ in range(2):
            id = subject.add(Generate(subject.id(), "Once upon a time", sampling(max_tokens=200), said))
            subject.drain()
        usage = finished(subject.outcomes[id])
        assert (usage.prompt_tokens, usage.cached_tokens) == (4, 4)


def test_engine_continues_after_another_is_closed(openvino: Subject, converted: Path) -> None:
    with closing(loaded("openvino", converted, kv_cache_tokens=512)) as other:
        other.engine.add(Generate("left-running", "Hello", GREEDY), 0.0)
        other.engine.step(0.0)
    assert openvino.fresh().run("Hello").text

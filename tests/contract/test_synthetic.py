"""What the synthetic engine promises beyond the contract: timing, KV accounting, text."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.engine_contract import Subject, finished, sampling
from tests.contract.resume_contract import begun, resumed

from forebay import engines
from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import Begun, Delta, Embed, Finished, Generate, Sampling
from forebay.engines.synthetic.model import encode


def subject(**settings: float) -> Subject:
    engine = engines.create("synthetic", "", settings)
    return Subject(engine, engine.load(), {}, vocabulary=0, batch_invariant=True)


def test_prompt_ending_in_partial_output_continues_it() -> None:
    engine = subject()
    whole = engine.run("Tell me of the river.", sampling(max_tokens=200))
    words = whole.text.split(" ")
    for count in (1, 5, len(words) - 1):
        begun = " ".join(words[:count])
        rest = engine.run("Tell me of the river." + begun, sampling(max_tokens=200))
        assert begun + rest.text == whole.text
        assert finished(rest).reason == finished(whole).reason


@given(
    wanted=st.builds(
        Sampling,
        max_tokens=st.integers(1, 60),
        temperature=st.sampled_from([0.0, 0.7, 2.0]),
        top_p=st.sampled_from([0.5, 1.0]),
        top_k=st.sampled_from([None, 4]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        presence_penalty=st.sampled_from([0.0, -1.0]),
        repetition_penalty=st.sampled_from([None, 1.3]),
        seed=st.integers(-(2**63), 2**63 - 1),
        ignore_eos=st.booleans(),
        stop=st.lists(st.sampled_from([" the", "er f", "s t", "n", "\u2603"]), max_size=2).map(tuple),
    ),
    place=st.floats(0, 1),
    logprobs=st.sampled_from([None, 2]),
)
def test_resumed_output_equals_uninterrupted_output(wanted: Sampling, place: float, logprobs: int | None) -> None:
    engine, prompt = subject(), "Tell me of the river"
    wanted = msgspec.structs.replace(wanted, logprobs=logprobs)
    texts, whole = begun(engine, prompt, wanted)
    if finished(whole).reason == "length":
        texts.append(whole.text)  # all was said, only the end is missing
    said = texts[round(place * (len(texts) - 1))]
    rest = resumed(engine, prompt, said, wanted)
    assert said + rest.text == whole.text
    assert finished(rest) == msgspec.structs.replace(finished(whole), id=finished(rest).id)
    assert rest.logprobs == whole.logprobs[len(whole.logprobs) - len(rest.logprobs) :]


def test_timing_follows_the_settings() -> None:
    engine = subject(prefill_tokens_per_s=100, step_ms=10)
    start = engine.now
    prompt = "a b c d e"
    engine.run(prompt, sampling(max_tokens=20, ignore_eos=True))
    assert engine.now - start == pytest.approx(len(encode(prompt)) / 100 + 20 * 0.010)


def test_concurrent_requests_share_steps() -> None:
    engine = subject(prefill_tokens_per_s=1e9, step_ms=10, concurrency=4)
    start = engine.now
    for n in range(8):
        engine.generate(f"prompt {n}", sampling(max_tokens=10, ignore_eos=True))
    engine.drain()
    assert engine.now - start == pytest.approx(2 * 10 * 0.010, rel=1e-3)


def test_no_event_before_its_time() -> None:
    engine = engines.create("synthetic", "", {"step_ms": 100})
    engine.load()
    engine.add(Generate("a", "hello", Sampling(max_tokens=1)), 50.0)
    first = engine.step(50.0)
    assert first.wait_s is not None
    assert engine.step(50.0 + first.wait_s / 2).events == ()
    done = engine.step(50.0 + first.wait_s)
    assert [type(event) for event in done.events] == [Begun, Delta, Finished]
    assert engine.step(50.0 + first.wait_s).wait_s is None


def test_full_kv_cache_makes_the_youngest_wait() -> None:
    engine = subject(kv_cache_tokens=256, concurrency=8)
    ids = [engine.generate(f"prompt {n}", sampling(max_tokens=100, ignore_eos=True)) for n in range(6)]
    most = most_waiting = 0
    while not all(engine.outcomes[id].ended for id in ids):
        engine.step()
        most = max(most, engine.load.kv_used_tokens or 0)
        most_waiting = max(most_waiting, engine.load.waiting)
    assert most <= 256
    assert most_waiting > 0
    alone = subject()
    for n, id in enumerate(ids):
        assert engine.outcomes[id].text == alone.run(f"prompt {n}", sampling(max_tokens=100, ignore_eos=True)).text


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ('{"type": "object"}', "{}"),
        ('{"type": "array", "items": {"type": "integer", "minimum": 3}, "minItems": 2}', "[3,3]"),
        ('{"anyOf": [{"$ref": "#/$defs/on"}], "$defs": {"on": {"const": "yes"}}}', '"yes"'),
        ('{"type": "number", "exclusiveMaximum": -5, "multipleOf": 3}', "-6"),
        ('{"type": ["string", "null"], "minLength": 2.0}', '"aa"'),
        ('{"type": "array", "minItems": 1.0, "items": {"type": "boolean"}}', "[false]"),
    ],
)
def test_schema_output_is_a_minimal_instance(schema: str, answer: str) -> None:
    assert subject().run("x", sampling(max_tokens=None, schema=schema)).text == answer


@pytest.mark.parametrize(
    "schema",
    [
        '{"properties": {"a":' * 200 + "{}" + "}}" * 200,
        '{"type": "number", "minimum": 1e308, "multipleOf": 1e-308}',
        '{"allOf": [{"$ref": "#/default"}], "default": {"allOf": 5}}',
        '{"$ref": "#/default", "default": {"properties": 5, "required": ["a"]}}',
        '{"const": {"a": 1}, "properties": {"a": {"$ref": "#/properties/a"}}}',
    ],
)
def test_schema_without_a_plain_instance_fails_its_own_request_only(schema: str) -> None:
    engine = subject()
    with pytest.raises(Refusal, match="not a usable JSON Schema"):
        engine.run("x", sampling(max_tokens=None, schema=schema))
    assert engine.run("x", sampling(max_tokens=3)).text


@pytest.mark.parametrize("task", ["chat", "embed"])
def test_error_share_fails_that_share_of_requests(task: str) -> None:
    engine = engines.create("synthetic", "", {"task": task, "error_share": 0.1})
    engine.load()
    codes = []
    for n in range(1000):
        work = Embed(f"r-{n}", "hello") if task == "embed" else Generate(f"r-{n}", "hello", Sampling(max_tokens=1))
        try:
            engine.add(work, 0.0)
        except Refusal as refusal:
            codes.append(refusal.code)
    assert 70 < len(codes) < 130
    assert set(codes) == {Code.REQUEST_FAILED}
    load = engine.step(0.0).load
    assert load.running + load.waiting == 1000 - len(codes)

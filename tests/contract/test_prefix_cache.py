"""Prefix cache reports of engines, by the block names given with the prompts."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import engines
from forebay.engines.prepare import prepare
from forebay.engines.protocol import Engine, EngineInfo, Finished, Generate, Sampling

STEPS_MAX = 20_000


class Subject:
    """A loaded engine, and what it says that its cache holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info: EngineInfo = engine.load()
        self.held: set[int] = set()
        self.ended: dict[str, Finished] = {}
        self.now = 0.0
        self._real = self.info.engine != "synthetic"

    def close(self) -> None:
        self.engine.close()

    def add(self, id: str, prompt: str, blocks: tuple[int, ...], **changes: Any) -> None:
        sampling = Sampling(**{"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, **changes})
        self.engine.add(Generate(id, prompt, sampling, blocks=blocks), self.now)

    def step(self) -> float | None:
        step = self.engine.step(self.now)
        self.ended.update({event.id: event for event in step.events if isinstance(event, Finished)})
        if step.cached is not None:
            assert not set(step.cached.stored) & set(step.cached.removed)
            self.held = (self.held - set(step.cached.removed)) | set(step.cached.stored)
        self.now += step.wait_s or 0.0
        if self._real and step.wait_s:
            threading.Event().wait(step.wait_s)
        return step.wait_s

    def run(self, id: str, prompt: str, blocks: tuple[int, ...], **changes: Any) -> Finished:
        """One request alone."""
        self.add(id, prompt, blocks, **changes)
        for _ in range(STEPS_MAX):
            self.step()
            if id in self.ended:
                return self.ended[id]
        raise AssertionError(f"{id} never ended")


def text(word: str, tokens: int) -> str:
    """About so many tokens."""
    return f"{word} river " * (tokens // 2)


@pytest.fixture(
    scope="module",
    params=["synthetic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("openvino", "llamacpp"))],
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    settings: dict[str, Any] = {"kv_cache_tokens": 512, "concurrency": 2}
    artifact = ""
    if request.param != "synthetic":
        settings["threads"] = 2
        source: Path = request.getfixturevalue("smollm2_gguf")
        cache: Path = request.getfixturevalue("model_home") / "cache"
        artifact = str(prepare(request.param, source, {}, cache, lambda stage, done, total: None))
    with closing(Subject(engines.create(request.param, artifact, settings))) as started:
        yield started


@pytest.mark.timeout(300)
def test_blocks_are_cached_until_evicted(subject: Subject) -> None:
    assert subject.info.blocks_exact is (subject.info.engine == "synthetic")
    assert subject.held == set()
    first = subject.run("a1", text("apple", 150), (1, 2, 3))
    assert first.cached_tokens in {0, None}
    assert subject.held == {1, 2, 3}
    again = subject.run("a2", text("apple", 150) + text("pear", 30), (1, 2, 3, 4))
    assert again.cached_tokens is None or 100 < again.cached_tokens < again.prompt_tokens
    assert subject.held == {1, 2, 3, 4}
    for n in range(4):
        subject.run(f"b{n}", text(f"stone{n}", 200), (10 * n + 10, 10 * n + 11))
    assert {40, 41} <= subject.held
    assert not {1, 2, 3, 4} & subject.held
    lost = subject.run("a3", text("apple", 150), (1, 2, 3))
    assert (lost.cached_tokens or 0) < 50
    subject.run("none", text("plum", 20), ())
    assert {1, 2, 3} <= subject.held


@pytest.mark.timeout(300)
def test_blocks_of_concurrent_requests_are_cached(subject: Subject) -> None:
    for n in range(2):
        subject.add(f"c{n}", text(f"cloud{n}", 100), (100 + n,), max_tokens=20)
    while not {"c0", "c1"} <= subject.ended.keys():
        subject.step()
    assert {100, 101} <= subject.held
    for n in range(2):
        again = subject.run(f"d{n}", text(f"cloud{n}", 100) + text("pear", 20), (100 + n, 200 + n))
        assert again.cached_tokens is None or again.cached_tokens > 80


def test_cached_prefix_costs_no_prefill_time() -> None:
    slow = Subject(engines.create("synthetic", "", {"prefill_tokens_per_s": 100, "step_ms": 1}))
    prompt = text("apple", 200)
    began = slow.now
    first = slow.run("a", prompt, (1, 2), max_tokens=1)
    assert slow.now - began > first.prompt_tokens / 100 - 0.1
    began = slow.now
    second = slow.run("b", prompt, (1, 2), max_tokens=1)
    assert second.cached_tokens == first.prompt_tokens - first.prompt_tokens % 2 - (first.prompt_tokens % 2 == 0)
    assert slow.now - began < 0.05


def test_a_prompt_cancelled_before_its_prefill_is_not_cached() -> None:
    engine = Subject(engines.create("synthetic", "", {"step_ms": 1}))
    engine.add("a", text("apple", 50), (1,))
    engine.step()
    engine.engine.cancel("a")
    engine.step()
    assert engine.held == set()
    engine.add("b", text("apple", 50), (1,), max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.engine.cancel("b")
    engine.step()
    assert engine.held == {1}


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(2, 40), st.booleans(), st.integers(0, 3)), max_size=12)


@given(REQUESTS)
def test_cached_tokens_match_held_blocks_within_the_memory_limit(
    todo: list[tuple[int, int, bool, int]],
) -> None:
    engine = Subject(engines.create("synthetic", "", {"kv_cache_tokens": 256, "concurrency": 3}))
    for n, (prompt, answer, cancels, steps) in enumerate(todo):
        engine.add(f"r{n}", text(f"w{prompt}", 20 + 20 * prompt), (10 * prompt, 10 * prompt + 1), max_tokens=answer)
        for _ in range(steps):
            engine.step()
        if cancels:
            engine.engine.cancel(f"r{n}")
    while engine.step() is not None:
        pass
    assert all(0 <= (end.cached_tokens or 0) < end.prompt_tokens for end in engine.ended.values())
    for prompt in range(6):
        held = engine.held & {10 * prompt, 10 * prompt + 1}
        end = engine.run(f"again {prompt}", text(f"w{prompt}", 20 + 20 * prompt), (10 * prompt, 10 * prompt + 1))
        assert bool(end.cached_tokens) == (10 * prompt in held)

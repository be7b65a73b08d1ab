"""What the worker makes of a request before the engine sees it."""

from typing import Any

import msgspec
import pytest

from forebay.core.errors import Code, Refusal
from forebay.core.model import Task
from forebay.engines.protocol import EngineInfo
from forebay.wire.openai_answer import ChatAnswer
from forebay.wire.openai_request import parse_chat, parse_completion, parse_embeddings
from forebay.worker.preflight import TOKEN_CHARS_MAX, chat_work, completion_work, embed_work

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}"
CHAT = EngineInfo("e", "1", Task.CHAT, 100, 4, ("seed",), chat_template=TEMPLATE, special_tokens={"bos_token": "^"})
PLAIN = EngineInfo("e", "1", Task.CHAT, 100, 4)
EMBED = EngineInfo("e", "1", Task.EMBED, 100, 4, dimensions=8)
HI = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]


def chat(info: EngineInfo = CHAT, **fields: Any) -> Any:
    request = parse_chat(msgspec.json.encode({"model": "m", "messages": HI} | fields))
    return chat_work(request, info, "r", ChatAnswer.names)


def complete(info: EngineInfo = CHAT, **fields: Any) -> Any:
    return completion_work(parse_completion(msgspec.json.encode({"model": "m", "prompt": "p"} | fields)), info, "r")


def embed(info: EngineInfo = EMBED, **fields: Any) -> Any:
    return embed_work(parse_embeddings(msgspec.json.encode({"model": "m", "input": "p"} | fields)), info, "r")


def test_messages_become_a_prompt_by_the_models_template() -> None:
    assert [work.prompt for work in chat()] == ["<system>a<user>b^"]


def test_choices_have_ids_and_seeds_of_their_own() -> None:
    works = chat(n=3, seed=2**63 - 2)
    assert [work.id for work in works] == ["r#0", "r#1", "r#2"]
    assert [work.sampling.seed for work in works] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [work.sampling.seed for work in chat(n=2)] == [None, None]


def test_choices_of_a_batch_are_numbered_prompt_by_prompt() -> None:
    works = complete(prompt=["p", "q"], n=2)
    assert [(work.id, work.prompt) for work in works] == [("r#0", "p"), ("r#1", "p"), ("r#2", "q"), ("r#3", "q")]
    assert [work.input for work in embed(input=[[1], [2, 3]])] == [(1,), (2, 3)]


@pytest.mark.parametrize(
    ("make", "info", "fields", "code", "param"),
    [
        (chat, EMBED, {}, Code.WRONG_TASK, "model"),
        (chat, PLAIN, {}, Code.WRONG_TASK, "model"),
        (complete, EMBED, {}, Code.WRONG_TASK, "model"),
        (embed, CHAT, {}, Code.WRONG_TASK, "model"),
        (chat, CHAT, {"frequency_penalty": 1}, Code.UNSUPPORTED_PARAMETER, "frequency_penalty"),
        (chat, CHAT, {"response_format": {"type": "json_object"}}, Code.UNSUPPORTED_PARAMETER, "response_format"),
        (chat, CHAT, {"logprobs": True}, Code.UNSUPPORTED_PARAMETER, "logprobs"),
        (complete, PLAIN, {"seed": 1}, Code.UNSUPPORTED_PARAMETER, "seed"),
        (complete, PLAIN, {"top_k": 5}, Code.UNSUPPORTED_PARAMETER, "top_k"),
        (embed, EMBED, {"dimensions": 7}, Code.UNSUPPORTED_PARAMETER, "dimensions"),
        (complete, PLAIN, {"prompt": [1] * 101}, Code.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (complete, PLAIN, {"prompt": ["a", "b" * (100 * TOKEN_CHARS_MAX + 1)]}, Code.CONTEXT_LENGTH_EXCEEDED,
         "prompt[1]"),
        (embed, EMBED, {"input": [[1], [1] * 101]}, Code.CONTEXT_LENGTH_EXCEEDED, "input[1]"),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_do_is_refused_by_name(
    make: Any, info: EngineInfo, fields: Any, code: Code, param: str
) -> None:
    with pytest.raises(Refusal) as caught:
        make(info, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_what_the_engine_can_do_passes() -> None:
    assert complete(PLAIN, temperature=0.5, top_p=0.9, stop="x", max_tokens=3)[0].sampling.stop == ("x",)
    assert chat(CHAT, seed=1)[0].sampling.seed == 1
    assert len(embed(EMBED, dimensions=8, input=["x"] * 2048)) == 2048

"""Embeddings, reranking and classification: bodies become tensors, tensors become responses."""

import base64
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.modelserver.tasks.rig import document, rig
from tests.net.rig import run

LABELED = {"object": "list", "model": "letters"}


def test_embeddings_keep_input_order_across_batches() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = document(await it.ask("/v1/embeddings", {"model": "lengths", "input": ["abc", "", "x"][:1]}))
            assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": [3.0, 0.5]}]
            answer = document(await it.ask("/v1/embeddings", {"model": "lengths", "input": ["abc", "x", "de"]}))
            assert [(each["index"], each["embedding"][0]) for each in answer["data"]] == [
                (0, 3.0),
                (1, 1.0),
                (2, 2.0),
            ]
            assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
            assert [each.inputs[0].shape for each in it.models.requests[1:]] == [(2, 1), (1, 1)]
            assert {each.outputs for each in it.models.requests} == {("EMBEDDING", "TOKENS")}

    run(main())


def test_base64_embeddings_have_the_same_values() -> None:
    async def main() -> None:
        async with rig() as it:
            body = {"model": "uncounted", "input": "héllo", "encoding_format": "base64", "dimensions": 2}
            answer = document(await it.ask("/v1/embeddings", body))
            assert struct.unpack("<2f", base64.b64decode(answer["data"][0]["embedding"])) == (5.0, 0.5)
            assert answer["usage"]["total_tokens"] == 0

    run(main())


def test_truncated_documents_are_marked_or_rejected() -> None:
    async def main() -> None:
        async with rig() as it:
            body = {"model": "cuts", "query": "abc", "documents": ["x", "abcd", "b", "long"]}
            answer = document(await it.ask("/v1/rerank", body))
            assert {each["index"]: each.get("truncated") for each in answer["results"]} == {
                0: None, 1: True, 2: None, 3: True,
            }  # fmt: skip
            assert answer["usage"] == {"total_tokens": 0, "truncated_documents": 2}
            refused = await it.ask("/v1/rerank", {**body, "truncate": False})
            assert (refused.status, document(refused)["error"]["param"]) == (400, "documents[1]")
            assert "1 more" in document(refused)["error"]["message"]
            answer = document(await it.ask("/v1/rerank", {**body, "documents": ["a"], "truncate": False}))
            assert answer["usage"]["truncated_documents"] == 0
            refused = await it.ask("/v1/rerank", {**body, "model": "overlap", "truncate": False})
            assert (refused.status, document(refused)["error"]["param"]) == (400, "truncate")

    run(main())


def test_documents_are_ranked_by_score_then_index() -> None:
    async def main() -> None:
        async with rig() as it:
            body: dict[str, Any] = {"model": "overlap", "query": "abc", "documents": ["x", "ab", "b", {"text": "ba"}]}
            answer = document(await it.ask("/v1/rerank", body))
            assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [
                (1, 2.0), (3, 2.0), (2, 1.0), (0, 0.0),
            ]  # fmt: skip
            assert "document" not in answer["results"][0]
            answer = document(await it.ask("/v1/rerank", {**body, "top_n": 2, "return_documents": True}))
            assert [each["document"]["text"] for each in answer["results"]] == ["ab", "ba"]
            body["documents"] *= 3
            answer = document(await it.ask("/v1/rerank", body))
            assert [each["index"] for each in answer["results"][:6]] == [1, 3, 5, 7, 9, 11]

    run(main())


def test_labels_are_sorted_by_score_without_padding() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = document(await it.ask("/v1/classify", {"model": "letters", "input": ["ab", "c"]}))
            one, two = answer["data"]
            assert one == {"index": 0, "labels": [{"label": "a", "score": 1.0}, {"label": "b", "score": 0.5}]}
            assert two == {"index": 1, "labels": [{"label": "c", "score": 1.0}]}
            answer = document(await it.ask("/v1/classify", {"model": "letters", "input": "ab", "top_k": 1}))
            assert [each["label"] for each in answer["data"][0]["labels"]] == ["a"]
            data = base64.b64encode(b"xyz").decode()
            for body in ({"data": data}, {"data": [data]}):
                answer = document(await it.ask("/v1/classify", {"model": "letters", **body}))
                assert [each["label"] for each in answer["data"][0]["labels"]] == ["x", "y", "z"]

    run(main())


def test_entities_have_character_offsets() -> None:
    async def main() -> None:
        async with rig() as it:
            inputs = ["é Anna met Bob", "nobody", "nobody", "Eve"]
            answer = document(await it.ask("/v1/classify", {"model": "capitals", "input": inputs, "top_k": 5}))
            first, *_, last = answer["data"]
            assert first["entities"] == [
                {"entity_group": "NAME", "word": "Anna", "start": 2, "end": 6},
                {"entity_group": "NAME", "word": "Bob", "start": 11, "end": 14},
            ]
            assert [each["entities"] for each in answer["data"][1:3]] == [[], []]
            assert last["entities"][0]["word"] == "Eve"
            answer = document(await it.ask("/v1/classify", {"model": "capitals", "input": ["nobody", "none"]}))
            assert answer["data"] == [{"index": 0, "entities": []}, {"index": 1, "entities": []}]

    run(main())


def test_spans_outside_their_text_are_a_violation() -> None:
    async def main() -> None:
        async with rig() as it:
            assert (await it.ask("/v1/classify", {"model": "capitals", "input": "Beyond all"})).status == 200
            answer = await it.ask("/v1/classify", {"model": "capitals", "input": ["Anna", "go Beyond"]})
            assert answer.status == 500
            assert "'START' and 'END' of a label are not within its text" in document(answer)["error"]["message"]

    run(main())


def test_non_batching_model_gets_single_rows_without_batch_dimension() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = document(await it.ask("/v1/classify", {"model": "alone", "input": ["ab", "c"]}))
            assert [len(each["labels"]) for each in answer["data"]] == [2, 1]
            assert [each.inputs[0].shape for each in it.models.requests] == [(1,), (1,)]

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", b"{", 400, "invalid_json", None),
        ("/v1/embeddings", {"model": "lengths"}, 400, "invalid_request", "input"),
        ("/v1/embeddings", {"model": "lengths", "input": [1, 2]}, 400, "unsupported_parameter", "input"),
        ("/v1/embeddings", {"model": "lengths", "input": [[1], [2]]}, 400, "unsupported_parameter", "input[0]"),
        ("/v1/embeddings", {"model": "lengths", "input": "a", "dimensions": 3}, 400, "unsupported_parameter",
         "dimensions"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": []}, 400, "invalid_request", "documents"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": "a"}, 400, "invalid_request", "documents"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": ["a", 1]}, 400, "invalid_request",
         "documents[1]"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": [{"text": ""}]}, 400, "invalid_request",
         "documents[0].text"),
        ("/v1/rerank", {"model": "overlap", "query": "", "documents": ["a"]}, 400, "invalid_request", "query"),
        ("/v1/rerank", {"model": "overlap", "query": "a" * 100_001, "documents": ["a"]}, 400, "invalid_request",
         "query"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": ["a"], "top_n": 0}, 400, "invalid_request",
         "top_n"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": ["a"], "to_n": 1}, 400, "invalid_request",
         "to_n"),
        ("/v1/rerank", {"model": "overlap", "query": "a", "documents": ["a"] * 1001}, 400, "invalid_request",
         "documents"),
        ("/v1/classify", {"model": "letters"}, 400, "invalid_request", "input"),
        ("/v1/classify", {"model": "letters", "input": []}, 400, "invalid_request", "input"),
        ("/v1/classify", {"model": "letters", "input": ["a", ""]}, 400, "invalid_request", "input[1]"),
        ("/v1/classify", {"model": "letters", "input": "a", "data": "YQ=="}, 400, "invalid_request", "data"),
        ("/v1/classify", {"model": "letters", "data": "not base64"}, 400, "invalid_request", "data"),
        ("/v1/classify", {"model": "letters", "data": ["YQ==", "é"]}, 400, "invalid_request", "data[1]"),
        ("/v1/classify", {"model": "capitals", "data": "YQ=="}, 400, "invalid_request", "data"),
    ],
)  # fmt: skip
def test_invalid_field_is_named_in_the_error(path: str, body: Any, status: int, code: str, param: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask(path, body)
            error = document(answer)["error"]
            assert (answer.status, error["code"], error["param"]) == (status, code, param), error["message"]

    run(main())


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_body_of_too_many_values_is_not_read_whatever_its_content_type(kind: str) -> None:
    async def main() -> None:
        async with rig() as it:
            body = b'{"model": "lengths", "input": [%b1]}' % (b"1234," * 1_000_001)
            answer = await it.ask("/v1/embeddings", body, content_type=kind)
            assert answer.status == 400
            assert "too much at once" in document(answer)["error"]["message"]

    run(main())


@given(st.lists(st.text(min_size=1), min_size=1, max_size=20), st.text(min_size=1))
def test_scores_match_their_documents(documents: list[str], query: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = document(
                await it.ask("/v1/rerank", {"model": "overlap", "query": query, "documents": documents})
            )
            found = {each["index"]: each["relevance_score"] for each in answer["results"]}
            assert found == {i: len(set(query) & set(each)) for i, each in enumerate(documents)}
            scores = [each["relevance_score"] for each in answer["results"]]
            assert scores == sorted(scores, reverse=True)

    run(main())

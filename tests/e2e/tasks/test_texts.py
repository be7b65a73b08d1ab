"""Text tasks with real models: known answers over both APIs, unchanged under concurrency."""

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tests.e2e.tasks.served import Served, at_once, serving

from forebay.cli.repository.demos import tabular

for each in ("onnxruntime", "tokenizers", "onnx", "fasttext", "spacy"):
    pytest.importorskip(each)

MODELS = ("bge-small-en", "reranker-en", "language-id", "entities-en", "file-type", "recommender")
QUERY = "How many people live in Berlin?"
DOCUMENTS = (
    "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
    "New York City is famous for the Metropolitan Museum of Art.",
    "Berlin is well known for its museums.",
    "Pasta is cooked in salted water.",
)
SCORES = (9.4, -11.2, -4.1, -11.2)
"""What the model says of them, to a tenth: further digits depend on how its integers are rounded."""
CROWDS = 5
"""So often several ask at once, until some of them have come at the same time on a machine that is busy."""
NAMES = "Apple is looking at buying a U.K. startup for $1 billion, said Tim Cook in London on Monday."
ENTITIES = [
    ("Apple", "ORG"), ("U.K.", "GPE"), ("$1 billion", "MONEY"),
    ("Tim Cook", "PERSON"), ("London", "GPE"), ("Monday", "DATE"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(Path(tmp_path_factory.mktemp("texts")), MODELS) as served:
        yield served


def texts(*values: str) -> "np.ndarray[Any, Any]":
    return np.array([[value.encode()] for value in values], object)


def over_v2(served: Served, model: str, **inputs: "np.ndarray[Any, Any]") -> over_http.InferResult:
    """The answer of the protocol's own client."""
    with over_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        tensors = []
        for name, array in inputs.items():
            kind = "BYTES" if array.dtype == object else "INT64"
            tensors.append(over_http.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        return client.infer(model, tensors)


def test_similar_sentences_have_similar_embeddings(served: Served) -> None:
    sentences = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "A cheetah is running behind its prey.",
    ]
    with served.openai() as client:
        answer = client.embeddings.create(model="bge-small-en", input=sentences)
    vectors = np.array([each.embedding for each in answer.data])
    alike = vectors @ vectors.T
    assert alike[0, 1] == pytest.approx(0.84, abs=0.03)
    assert alike[0, 2] < 0.6 < alike[0, 1]
    assert np.diag(alike) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens > 20
    found = over_v2(served, "bge-small-en", TEXT=texts(*sentences)).as_numpy("EMBEDDING")
    assert np.array_equal(np.asarray(found, np.float32), vectors.astype(np.float32))


def test_rerank_puts_the_relevant_document_first(served: Served) -> None:
    answer = served.post("/v1/rerank", model="reranker-en", query=QUERY, documents=DOCUMENTS, return_documents=True)
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[i] for i in range(4)] == pytest.approx(SCORES, abs=0.15)
    assert answer["results"][0]["document"]["text"] == DOCUMENTS[0]
    scores = over_v2(
        served, "reranker-en", QUERY=texts(*[QUERY] * 4), DOCUMENT=texts(*DOCUMENTS)
    ).as_numpy("SCORE")  # fmt: skip
    assert scores.ravel().tolist() == [found[i] for i in range(4)]


def test_rerank_error_names_the_document_that_is_too_long(served: Served) -> None:
    answer = served.post("/v1/rerank", model="reranker-en", query=QUERY, documents=[DOCUMENTS[0], "long " * 900])
    assert [each.get("truncated") for each in answer["results"]] == [None, True]
    assert answer["usage"]["truncated_documents"] == 1


def test_very_long_document_scores_as_its_beginning(served: Served) -> None:
    documents = [DOCUMENTS[0] * repeated for repeated in (150, 10_000)]
    answer = served.post("/v1/rerank", model="reranker-en", query=QUERY, documents=[*documents, " " * 20_000 + "x"])
    results = {each["index"]: each for each in answer["results"]}
    assert results[0]["relevance_score"] == results[1]["relevance_score"]
    assert [results[i]["truncated"] for i in range(3)] == [True, True, True]


def test_languages_are_detected(served: Served) -> None:
    sentences = {"fr": "Le chat est sur la table.", "en": "Hello there my friend", "ja": "今日はいい天気です"}
    answer = served.post("/v1/classify", model="language-id", input=list(sentences.values()), top_k=1)
    assert [each["labels"][0]["label"] for each in answer["data"]] == list(sentences)
    assert answer["data"][2]["labels"][0]["score"] > 0.99
    labels = over_v2(served, "language-id", INPUT=texts(*sentences.values())).as_numpy("LABEL")
    assert [row[0].decode() for row in labels] == list(sentences)


def test_entities_are_found_at_their_offsets(served: Served) -> None:
    answer = served.post("/v1/classify", model="entities-en", input=["nothing here", NAMES])
    assert answer["data"][0]["entities"] == []
    found = answer["data"][1]["entities"]
    assert [(each["word"], each["entity_group"]) for each in found] == ENTITIES
    assert all(NAMES[each["start"] : each["end"]] == each["word"] for each in found)
    result = over_v2(served, "entities-en", INPUT=texts(NAMES))
    assert [each.decode() for each in result.as_numpy("LABEL")[0]] == [kind for _, kind in ENTITIES]


def test_entity_error_names_the_text_that_is_too_long(served: Served) -> None:
    status, error = served.refused("/v1/classify", model="entities-en", input=["fine"] * 5 + ["x" * 100_001])
    assert (status, error["param"]) == (400, "input[5]")
    assert "100001 characters; this model takes at most 100000" in error["message"]


def test_file_types_are_detected_from_content(served: Served) -> None:
    source = Path(tabular.__file__).read_bytes()
    blobs = [source, b'{"a": 1}\n{"a": 2}\n{"a": 3}\n' * 10, gzip.compress(source * 3, mtime=0)]
    data = [base64.b64encode(each).decode() for each in blobs]
    answer = served.post("/v1/classify", model="file-type", data=data)
    best = [each["labels"][0] for each in answer["data"]]
    assert [each["label"] for each in best] == ["python", "jsonl", "gzip"]
    assert best[0]["score"] > 0.9


def test_items_are_recommended_over_both_transports(served: Served) -> None:
    users = np.arange(40, dtype=np.int64)[:, None]
    items = over_v2(served, "recommender", USER=users).as_numpy("ITEM")
    assert (items % tabular.TASTES == users % tabular.TASTES).mean() > 0.95
    tensor = over_grpc.InferInput("USER", [40, 1], "INT64")
    tensor.set_data_from_numpy(users)
    with over_grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        assert np.array_equal(client.infer("recommender", [tensor]).as_numpy("ITEM"), items)


def test_answers_do_not_depend_on_concurrent_requests(served: Served) -> None:
    def ask(i: int) -> list[Any]:
        documents = DOCUMENTS[i % 4 :] + DOCUMENTS[: i % 4]
        query = QUERY + "?" * (i % 3)
        return [
            served.post("/v1/rerank", model="reranker-en", query=query, documents=documents)["results"],
            served.post("/v1/embeddings", model="bge-small-en", input=list(documents[: 1 + i % 4]))["data"],
            served.post("/v1/classify", model="language-id", input=list(documents))["data"],
            served.post("/v1/classify", model="entities-en", input=[NAMES, documents[0]])["data"],
        ]

    alone = [ask(i) for i in range(8)]
    for _ in range(CROWDS):
        assert at_once(ask) == alone
        if max(served.batches("reranker-en")) > len(DOCUMENTS):
            return
    raise AssertionError("nobody has shared a batch")


def test_too_long_text_fails_only_its_own_request(served: Served) -> None:
    def ask(i: int) -> Any:
        if i == 3:
            return served.refused("/v1/embeddings", model="bge-small-en", input=["fine", "long " * 600])
        return served.post("/v1/embeddings", model="bge-small-en", input="fine")["data"][0]["index"]

    answers = at_once(ask)
    status, error = answers.pop(3)
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "input[1]")
    assert "602 tokens" in error["message"]
    assert answers == [0] * 7


def test_text_of_too_many_characters_is_refused_before_its_tokens_are_counted(served: Served) -> None:
    status, error = served.refused("/v1/embeddings", model="bge-small-en", input=["fine", "." * 1_000_000])
    assert (status, error["param"]) == (400, "input[1]")
    assert "1000000 characters; this model takes at most 100000" in error["message"]


def test_models_are_listed_with_their_tasks(served: Served) -> None:
    with served.openai() as client:
        listed = {each.id: each.model_extra["task"] for each in client.models.list() if each.model_extra}
    assert listed == {
        "bge-small-en": "embed", "reranker-en": "rerank",
        "language-id": "classify", "entities-en": "classify", "file-type": "classify",
    }  # fmt: skip

"""`POST /v1/embeddings` in OpenAI's format, for models of the task `embed`.

Inputs: `TEXT` (BYTES, one text per row). Outputs: `EMBEDDING` (FP32, one vector per row); optionally `TOKENS` (an
integer per row).
"""

from base64 import b64encode
from typing import Final

import orjson

from forebay.core.errors import Code, Refusal
from forebay.core.serving.values import InferResponse, Tensor
from forebay.engines.tensor.protocol import Array
from forebay.modelserver.tasks.contract import Answer, Job, Results, Task
from forebay.modelserver.tasks.tensors import as_array, as_bytes, strings, token_count
from forebay.wire.openai_answer import embedding_item, embeddings_body
from forebay.wire.openai_request import EmbeddingsRequest, parse_embeddings

TEXT: Final = "TEXT"
EMBEDDING: Final = "EMBEDDING"
TOKENS: Final = "TOKENS"


def read(body: bytes, _: bytes) -> Job:
    """Parse a request body into a job. Raises `Refusal`."""
    request = parse_embeddings(body)
    texts: list[str] = []
    for i, one in enumerate(request.inputs):
        where = "input" if len(request.inputs) == 1 else f"input[{i}]"
        if not isinstance(one, str):
            raise Refusal(Code.UNSUPPORTED_PARAMETER, f"'{where}' holds tokens; this model takes texts.", where)
        texts.append(one)

    def inputs(low: int, high: int) -> tuple[Tensor, ...]:
        return (strings(TEXT, texts[low:high], (high - low, 1)),)

    def keep(response: InferResponse) -> InferResponse:
        return _as_json(response, request)

    return Job(request.model, inputs, _answer, len(texts), keep=keep)


TASK: Final[Task] = Task("embed", read, (EMBEDDING,), (TOKENS,))


def _as_json(response: InferResponse, request: EmbeddingsRequest) -> InferResponse:
    """The response with its vectors encoded as JSON now: encoding thousands at the end would block the event loop."""
    outputs = []
    for tensor in response.outputs:
        made = tensor.copied()
        if tensor.name == EMBEDDING:
            size = tensor.shape[-1]
            if request.dimensions not in (None, size):
                text = f"'dimensions' is {request.dimensions}; this model always gives {size}."
                raise Refusal(Code.UNSUPPORTED_PARAMETER, text, "dimensions")
            vectors = as_array(made).astype("<f4", copy=False).reshape(-1, size)
            made = strings(EMBEDDING, [_json(row, request.base64) for row in vectors], (len(vectors),))
        outputs.append(made)
    response.outputs = tuple(outputs)
    return response


def _answer(results: Results) -> Answer:
    found = [json for tensor in results.tensors(EMBEDDING) for json in as_bytes(tensor)]
    items = [embedding_item(i, json) for i, json in enumerate(found)]
    tokens = token_count(results.tensors(TOKENS))
    return Answer(embeddings_body(results.model, items, tokens), tokens=tokens)


def _json(vector: Array, base64: bool) -> bytes:
    if base64:
        return b'"' + b64encode(vector.tobytes()) + b'"'
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)

"""Decoupled models, `async` models, and models that call others."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.contract.tensor.models import Emitted, spec
from tests.contract.tensor.python_models import CONFIG, DECOUPLED, ONE, answers, asked, loaded, value

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.core.serving.errors import Kind
from forebay.engines.tensor.protocol import Request, Response
from forebay.engines.tensor.python.backend import PythonBackend

FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
ENDED_WITHIN_S = 60.0

Load = Callable[..., PythonBackend]


@pytest.fixture
def load(tmp_path: Path, request: pytest.FixtureRequest) -> Load:
    """Loads a model of which only the class's body is given; it is closed in the end."""

    def made(body: str, config: ModelConfig = DECOUPLED, **more: object) -> PythonBackend:
        backend = loaded(tmp_path, body.replace("FINAL", FINAL), config, **more)  # type: ignore[arg-type]
        request.addfinalizer(backend.close)
        return backend

    return made


def ended(emitted: Emitted, count: int) -> None:
    """Wait until that many requests have come to their end."""
    for _ in range(count):
        assert emitted.ended.acquire(timeout=ENDED_WITHIN_S)


def seen(emitted: Emitted, index: int = 0) -> list[tuple[object, bool]]:
    return [(None if response is None else value(response), final) for response, final in emitted.of(index)]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_decoupled_model_sends_any_number_of_responses(load: Load, prefix: str) -> None:
    backend = load(f"""
        {prefix}def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for n in range(int(x(request)[0]) - 1):
                    sender.send(out(np.float32([n])))
                sender.send(flags=FINAL)
    """)

    returned, emitted = answers(backend, asked(3))
    ended(emitted, 3)

    assert returned == [None] * 3
    assert [seen(emitted, n) for n in range(3)] == [
        [(None, True)],
        [([0], False), (None, True)],
        [([0], False), ([1], False), (None, True)],
    ]


def test_responses_can_be_sent_from_a_thread_after_execute(load: Load) -> None:
    backend = load("""
        def execute(self, requests):
            self.go, sender = threading.Event(), requests[0].get_response_sender()
            def later():
                self.go.wait()
                sender.send(out(np.float32([5])), flags=FINAL)
            self.thread = threading.Thread(target=later)
            self.thread.start()
        def finalize(self): self.thread.join()
    """)

    _, emitted = answers(backend, asked())
    assert emitted.responses == []
    backend._model.go.set()
    ended(emitted, 1)

    assert seen(emitted) == [([5], True)]


def test_dropped_sender_ends_its_request(load: Load) -> None:
    backend = load("def execute(self, requests): requests[0].get_response_sender().send(out(x(requests[0])))")

    _, emitted = answers(backend, asked(2))
    ended(emitted, 2)

    assert [seen(emitted, n) for n in range(2)] == [[([1], False), (None, True)], [(None, True)]]


def test_non_decoupled_model_without_response_is_an_error(load: Load) -> None:
    _, emitted = answers(load("def execute(self, requests): pass", CONFIG), asked())
    ended(emitted, 1)

    assert seen(emitted) == [("The model has not answered the request.", True)]


def test_non_decoupled_model_can_use_the_sender(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            first, second = (request.get_response_sender() for request in requests)
            first.send(out(np.float32([9])), flags=FINAL)
            second.send(out(np.float32([8])))
            second.send(flags=FINAL)
            return [None, None]
        """,
        CONFIG,
    )

    returned, emitted = answers(backend, asked(2))

    assert returned == [None, None]
    assert [seen(emitted, n) for n in range(2)] == [[([9], True)], [([8], False), (None, True)]]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_exception_in_a_decoupled_model_ends_open_requests(load: Load, prefix: str) -> None:
    backend = load(f"""
        {prefix}def execute(self, requests):
            self.senders = [request.get_response_sender() for request in requests]
            self.senders[0].send(out(x(requests[0])), flags=FINAL)
            raise ValueError('boom')
    """)

    returned, emitted = answers(backend, asked(2))
    ended(emitted, 1)
    if prefix:
        ended(emitted, 1)
        returned = [None, emitted.of(1)[0][0]]

    assert seen(emitted) == [([1], True)]
    assert returned[0] is None
    assert "message: ValueError: boom" in str(value(returned[1]))
    with pytest.raises(Exception, match="Response sender has been closed"):
        backend._model.senders[1].send(None, 1)


@pytest.mark.parametrize(
    ("config", "code", "text"),
    [
        (DECOUPLED, "send()", "Inference Response object must be provided when the response flags is set to zero."),
        (DECOUPLED, "send(flags=5)", "Unable to send response. Unsupported flag provided."),
        (CONFIG, "send(flags=FINAL)", "Non-decoupled model cannot send complete final before sending a response."),
        (DECOUPLED, "send('text')", "response must be an InferenceResponse, not <class 'str'>"),
        (DECOUPLED, "send(out(np.array(['\\ud800'], object)), flags=FINAL)", "UnicodeEncodeError: "),
    ],
)
def test_invalid_send_is_rejected(load: Load, config: ModelConfig, code: str, text: str) -> None:
    backend = load(f"def execute(self, requests): requests[0].get_response_sender().{code}", config)

    (response,), _ = answers(backend, asked())

    assert text in str(value(response))


def test_a_decoupled_model_must_not_return_responses(load: Load) -> None:
    (response,), _ = answers(load("def execute(self, requests): return [out(x(requests[0]))]"), asked())

    assert value(response) == (
        "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the decoupled "
        "mode and the execute function must return None."
    )


@pytest.mark.parametrize("flags", [0, 1], ids=["open", "ended"])
def test_response_and_sender_for_one_request_fails_only_that_request(load: Load, flags: int) -> None:
    backend = load(
        f"""
        def execute(self, requests):
            requests[1].get_response_sender().send(out(x(requests[1])), flags={flags})
            return [out(x(request)) for request in requests]
        """,
        CONFIG,
    )

    (first, second), emitted = answers(backend, asked(2))

    assert value(first) == [1]
    assert seen(emitted, 1) == [([2], bool(flags))]
    if flags:
        assert second is None
    else:
        assert "Non-decoupled model cannot send more than one response." in str(value(second))


def test_rescheduled_request_must_not_have_a_response(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [out(x(requests[0]))]
        """,
        CONFIG,
    )

    (response,), _ = answers(backend, asked())

    assert "Expected a None object in the execute function return list for reschduled" in str(value(response))


@pytest.mark.parametrize("config", [CONFIG, DECOUPLED], ids=["one answer", "decoupled"])
def test_request_can_be_rescheduled(load: Load, config: ModelConfig) -> None:
    backend = load(
        f"""
        def execute(self, requests):
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return {None if config.decoupled else "[None, out(x(requests[1]))]"}
        """,
        config,
    )

    returned, emitted = answers(backend, asked(2))

    first = emitted.of(0)[0][0] if config.decoupled else returned[0]
    assert first == Response(reschedule=True)


def test_async_requests_share_one_event_loop(load: Load) -> None:
    backend = load("""
        async def execute(self, requests):
            self.event = getattr(self, 'event', None) or asyncio.Event()
            if x(requests[0])[0] == 1:
                await self.event.wait()
            else:
                self.event.set()
            requests[0].get_response_sender().send(out(x(requests[0])), flags=FINAL)
    """)
    emitted = Emitted()
    first, second = asked(2)

    backend.execute(0, [first], emitted)
    backend.execute(0, [second], emitted)
    ended(emitted, 2)

    assert sorted(value(response)[0] for _, response, _ in emitted.responses) == [1, 2]  # type: ignore[index]


def test_a_cancelled_task_in_execute_is_an_error(load: Load) -> None:
    backend = load("""
        async def execute(self, requests):
            task = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task
    """)

    _, emitted = answers(backend, asked())
    ended(emitted, 1)

    ((response, final),) = emitted.of(0)
    assert response is not None
    assert "message: CancelledError" in response.error
    assert final


def test_model_sees_request_cancellation(load: Load) -> None:
    gone = threading.Event()
    backend = load(
        """
        def execute(self, requests):
            return [out(np.float32([r.is_cancelled(), r.get_response_sender().is_cancelled()])) for r in requests]
        """,
        CONFIG,
    )
    request = asked(1, cancelled=gone.is_set)

    before, _ = answers(backend, request)
    gone.set()
    after, _ = answers(backend, request)

    assert [value(before[0]), value(after[0])] == [[0, 0], [1, 1]]


class Other:
    """Another model of the server: it answers from a thread of its own, as the server does."""

    def __init__(self, *responses: Response) -> None:
        self.responses = responses
        self.calls: list[tuple[str, int, Request]] = []
        self.withdrawn = 0

    def __call__(
        self, model: str, version: int, request: Request, on_response: Callable[[Response, bool], None]
    ) -> Callable[[], None]:
        self.calls.append((model, version, request))

        def answer() -> None:
            for place, response in enumerate(self.responses, 1):
                on_response(response, place == len(self.responses))

        threading.Thread(target=answer).start()
        return self.withdraw

    def withdraw(self) -> None:
        self.withdrawn += 1


BLS = """
    {prefix}def execute(self, requests):
        request = pb_utils.InferenceRequest(
            model_name='other', requested_output_names=['Z'], inputs=[pb_utils.Tensor('IN', x(requests[0]))],
            request_id='inner', correlation_id=4, flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
            timeout=5, parameters={{'k': 'v'}}, model_version=2)
        {body}
"""


@pytest.mark.parametrize(("prefix", "how"), [("", "request.exec()"), ("async ", "await request.async_exec()")])
def test_model_calls_another_model(load: Load, prefix: str, how: str) -> None:
    other = Other(Response({"Z": ONE * 7}))
    body = f"return [out(pb_utils.get_output_tensor_by_name({how}, 'Z').as_numpy())]"
    backend = load(BLS.format(prefix=prefix, body=body), CONFIG, call=other)

    (response,), _ = answers(backend, asked())

    assert value(response) == [7]
    ((model, version, request),) = other.calls
    assert (model, version, request.id, request.wanted, request.correlation_id) == ("other", 2, "inner", ("Z",), 4)
    assert (request.start, request.end, request.timeout_us, request.parameters) == (True, False, 5, {"k": "v"})
    assert {name: array.tolist() for name, array in request.inputs.items()} == {"IN": [1]}


def test_decoupled_call_responses_can_be_iterated_repeatedly(load: Load) -> None:
    other = Other(Response({"Z": ONE}), Response({"Z": ONE * 2}), Response())
    body = """
        found = request.exec(decoupled=True)
        twice = [[tensor.as_numpy()[0] for each in found for tensor in each.output_tensors()] for _ in range(2)]
        found.cancel()
        return [out(np.float32(sum(twice, [])))]
    """
    backend = load(BLS.format(prefix="", body=body.strip()), CONFIG, call=other)

    (response,), _ = answers(backend, asked())

    assert value(response) == [1, 2, 1, 2]
    assert other.withdrawn == 0  # there was nothing to cancel any more


def test_partially_read_call_can_be_cancelled(load: Load) -> None:
    other = Other(Response({"Z": ONE}), Response())
    body = """
        found = request.exec(decoupled=True)
        next(iter(found))
        found.cancel()
        return [out(ONE)]
    """
    backend = load(
        BLS.format(prefix="", body=body.strip().replace("ONE", "np.ones(1, np.float32)")), CONFIG, call=other
    )

    answers(backend, asked())

    assert other.withdrawn == 1


def test_call_takes_bytes_and_values_of_numpy_as_triton_does(load: Load) -> None:
    other = Other(Response({"Z": ONE}))
    backend = load(
        """
        def execute(self, requests):
            pb_utils.InferenceRequest(
                model_name=np.array([b'other'], object)[0], requested_output_names=[b'Z', np.str_('\u00e9')],
                inputs=[pb_utils.Tensor(np.str_('IN'), x(requests[0]))], request_id=b'inner', correlation_id=True,
                timeout=np.uint32(5), parameters={np.str_('k'): np.str_('v')}, model_version=np.int64(2)).exec()
            return [out(x(requests[0]))]
        """,
        CONFIG,
        call=other,
    )

    (response,), _ = answers(backend, asked())

    assert value(response) == [1]
    ((model, version, request),) = other.calls
    sent = (model, version, request.id, request.wanted, request.correlation_id, request.timeout_us)
    told = (*sent, request.parameters, list(request.inputs))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == [
        *("other", 2, "inner", ["Z", "\u00e9"], 1, 5),
        {"k": "v"},
        ["IN"],
    ]


def test_call_with_a_duplicate_input_is_rejected(load: Load) -> None:
    other = Other(Response({"Z": ONE}))
    body = """
        request.inputs().append(pb_utils.Tensor('IN', x(requests[0])))
        return [pb_utils.InferenceResponse(error=each.error()) for each in request.exec(decoupled=True)]
    """
    backend = load(BLS.format(prefix="", body=body.strip()), CONFIG, call=other)

    (response,), _ = answers(backend, asked())

    text = "Model other - Error when running inference: [request id: inner] input 'IN' already exists in request"
    assert value(response) == text
    assert other.calls == []


def test_a_call_that_may_not_have_several_responses_is_cancelled_at_the_second(load: Load) -> None:
    other = Other(Response({"Z": ONE}), Response({"Z": ONE}), Response())
    backend = load(BLS.format(prefix="", body="return [request.exec()]"), CONFIG, call=other)

    (response,), _ = answers(backend, asked())

    assert "Model other is using the decoupled." in str(value(response))
    assert other.withdrawn == 1


@pytest.mark.parametrize(
    ("responses", "text", "code"),
    [
        ((Response(error="no such model", kind=Kind.NOT_FOUND),), "no such model", 2),
        ((Response({"Z": ONE}), Response({"Z": ONE})), "Model other is using the decoupled.", 1),
        ((Response({"Z": ONE}), Response()), "fine", 1),
    ],
)
def test_failed_call_returns_an_error_to_the_model(
    load: Load, responses: tuple[Response, ...], text: str, code: int
) -> None:
    body = """
        found = request.exec()
        said = (found.error().message(), found.error().code()) if found.has_error() else ('fine', 1)
        return [out(np.array([each if isinstance(each, str) else str(each) for each in said], object))]
    """
    config = replace(CONFIG, outputs=(spec("Y", Datatype.BYTES, -1),))
    backend = load(BLS.format(prefix="", body=body.strip()), config, call=Other(*responses))

    (response,), _ = answers(backend, asked())

    found, number = (each.decode() for each in value(response))  # type: ignore[attr-defined]
    assert found.startswith(text)
    assert number == str(code)


def test_call_that_cannot_be_sent_returns_its_error(load: Load) -> None:
    def broken(*_: object) -> None:
        raise OSError("the server is gone")

    body = "return [pb_utils.InferenceResponse(error=request.exec().error())]"
    backend = load(BLS.format(prefix="", body=body), CONFIG, call=broken)

    (response,), _ = answers(backend, asked())

    assert value(response) == "the server is gone"


def test_calls_outside_execute_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="BLS is only supported during the 'execute' function"):
        loaded(
            tmp_path,
            """
            def initialize(self, args):
                pb_utils.InferenceRequest(model_name='o', requested_output_names=[], inputs=[]).exec()
            """,
            call=Other(),
        )


def test_dlpack_exchange_does_not_copy() -> None:
    from forebay.engines.tensor.python.tensors import Tensor

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    through = Tensor.from_dlpack("Y", Tensor.from_dlpack("X", array).to_dlpack())

    assert np.shares_memory(through.as_numpy(), array)
    assert np.from_dlpack(through).tolist() == array.tolist()

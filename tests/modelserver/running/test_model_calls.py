"""Models that declare which others they call: loaded with them, served only beside them."""

import asyncio
from pathlib import Path

import pytest
from tests.modelserver.models.rig import IO, config, ensemble, numbers, serving, tensor, write

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.models.options import Control
from forebay.modelserver.process.calls import CANCELLED
from forebay.modelserver.process.child.running import IN_COPY

pytestmark = pytest.mark.slow
ONE = tensor("IN", [[1.0]])
DOUBLE = """
    def answer(self, request):
        return give(get(request) * 2)
"""
CALLS = """
    def answer(self, request):
        asked = pb_utils.InferenceRequest(model_name="{name}", requested_output_names=["OUT"],
                                          inputs=[pb_utils.Tensor("IN", get(request))])
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return give(pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy() + 1)
"""
IN_A_COPY = """
    def answer(self, request):
        reads, writes = os.pipe()
        if not os.fork():
            asked = pb_utils.InferenceRequest(model_name="double", requested_output_names=["OUT"],
                                              inputs=[pb_utils.Tensor("IN", get(request))])
            answer = asked.exec()
            os.write(writes, (answer.error().message() if answer.has_error() else "none").encode())
            os._exit(0)
        os.wait()
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(os.read(reads, 1000).decode()))
"""

IO_OF_7 = b"""
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return config
"""
KEEPER = """
    def answer(self, request):
        step, name = get(request)[0, 0], "double"
        try:
            if step == 1:
                pb_utils.load_model(model_name=name)
            elif step == 2:
                pb_utils.unload_model(name, unload_dependents=True)
            elif step == 3:
                config = '{"backend": "python", "max_batch_size": 2}'
                pb_utils.load_model(name, config=config, files={"file:7/model.py": SOURCE, "file:7/empty": b""})
            elif step == 4:
                pb_utils.load_model("nobody")
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"refused: {error}"))
        ready = pb_utils.is_model_ready(name) + 2 * pb_utils.is_model_ready(name, "7")
        return give(np.full((1, 1), ready, np.float32))
"""

NAMES_BYTES = CALLS.replace('"{name}"', 'np.array([b"double"], object)[0]').replace(
    "+ 1)", "+ pb_utils.is_model_ready(b'double', b'1'), np.str_('OUT'))"
)

ENDLESS = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                sender.send(give(get(request)))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENOUGH = """
    def answer(self, request):
        asked = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["OUT"],
                                          inputs=[pb_utils.Tensor("IN", get(request))])
        responses = asked.exec(decoupled=True)
        next(responses)
        responses.cancel()
        responses.cancel()
        *_, last = responses
        return pb_utils.InferenceResponse(error=last.error())
"""


BORROWS = """
    def initialize(self, args):
        self.found = pb_utils.is_model_ready("double")
        pb_utils.load_model("double")
        assert pb_utils.is_model_ready("double")
    def answer(self, request):
        return give(get(request) + self.found)
    def finalize(self):
        pb_utils.unload_model("double")
"""
"""As in the documentation of Triton's Python backend."""


def calls(*names: str) -> str:
    said = f'parameters {{ key: "forebay.calls" value {{ string_value: "{", ".join(names)}" }} }}'
    return config(said)


def caller(root: Path, name: str, called: str, *more: str) -> None:
    write(root, name, calls(called, *more), CALLS.replace("{name}", called))


def chain(root: Path) -> None:
    """An ensemble of one step, which calls a model that calls another one."""
    write(root, "double", config(), DOUBLE)
    caller(root, "once", "double")
    caller(root, "twice", "once")
    ensemble(root, "whole", [("twice", {"IN": "IN"}, {"OUT": "OUT"})], f"max_batch_size: 8 {IO.format(dims='-1')}")


def test_model_loads_another_in_initialize_and_unloads_it_in_finalize(tmp_path: Path) -> None:
    write(tmp_path, "double", config(), DOUBLE)
    write(tmp_path, "borrows", config(), BORROWS)

    async def main() -> None:
        async with serving(tmp_path, startup=("borrows",), loads_max=1) as server:
            assert server.states("double") == {"1": ("READY", "")}
            assert await server.numbers("borrows", ONE) == [[1.0]]
            await server.load("borrows", {})
            await server.unload("borrows", False)
            assert server.states("double") == {"1": ("UNAVAILABLE", "unloaded")}
            await server.load("double", {})
            await server.load("borrows", {})
            assert await server.numbers("borrows", ONE) == [[2.0]]

    asyncio.run(main())


def test_called_models_are_loaded_and_unloaded_with_their_callers(tmp_path: Path) -> None:
    chain(tmp_path)
    caller(tmp_path, "other", "double")

    async def main() -> None:
        async with serving(tmp_path, startup=("whole",)) as server:
            assert await server.numbers("whole", ONE) == [[4.0]]
            await server.load("other", {})
            await server.unload("whole", True)
            assert [entry.name for entry in server.index(True)] == ["double", "other"]
            assert await server.numbers("other", ONE) == [[3.0]]
            await server.unload("other", True)
            assert server.index(True) == []

    asyncio.run(main())


def test_a_model_is_unavailable_without_the_models_it_calls(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("whole",)) as server:
            await server.unload("double", False)
            assert server.index(True) == []
            assert (
                server.states("once")["1"][1] == "unloaded: model 'once' calls 'double' which has no loaded version."
            )
            with pytest.raises(Refused, match="no available versions"):
                server.ask("whole", ONE)
            await server.load("double", {})
            assert await server.numbers("whole", ONE) == [[4.0]]
            assert server.ready

    asyncio.run(main())


def test_reloading_a_called_model_interrupts_no_caller(tmp_path: Path) -> None:
    chain(tmp_path)

    async def main() -> None:
        async with serving(tmp_path, startup=("once",)) as server:
            before = server.processes().pids
            write(tmp_path, "double", config(), DOUBLE.replace("* 2", "* 3"))
            await server.load("double", {})
            assert await server.numbers("once", ONE) == [[4.0]]
            assert len(set(before) & set(server.processes().pids)) == 1

    asyncio.run(main())


def test_model_can_name_others_by_bytes(tmp_path: Path) -> None:
    write(tmp_path, "double", config(), DOUBLE)
    write(tmp_path, "m", calls("double"), NAMES_BYTES)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            assert await server.numbers("m", ONE) == [[3.0]]
            assert server.processes().replaced == 0

    asyncio.run(main())


def test_model_can_cancel_its_call_of_another_model(tmp_path: Path) -> None:
    write(tmp_path, "endless", config("model_transaction_policy { decoupled: true }"), ENDLESS)
    write(tmp_path, "enough", calls("endless"), ENOUGH)

    async def main() -> None:
        async with serving(tmp_path, startup=("enough",)) as server:
            for _ in range(2):  # the second one finds the called model's only instance free
                refused = await server.ask("enough", ONE).error()
                assert (refused.kind, refused.text) == (Kind.CANCELLED, CANCELLED)

    asyncio.run(main())


def test_call_in_a_forked_copy_of_the_process_is_an_error_there_only(tmp_path: Path) -> None:
    write(tmp_path, "double", config(), DOUBLE)
    write(tmp_path, "m", calls("double"), IN_A_COPY)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for _ in range(2):
                assert (await server.ask("m", ONE).error()).text == IN_COPY
            assert server.processes().replaced == 0

    asyncio.run(main())


@pytest.mark.parametrize("loaded", ["double", "whole"])
def test_reloading_a_called_model_invalidates_cached_responses(loaded: str, tmp_path: Path) -> None:
    cached = "response_cache { enable: true }"
    write(tmp_path, "double", config(), DOUBLE)
    caller(tmp_path, "once", "double")
    write(tmp_path, "twice", calls("once") + cached, CALLS.replace("{name}", "once"))
    io = f"max_batch_size: 8 {IO.format(dims='-1')} {cached}"
    ensemble(tmp_path, "whole", [("twice", {"IN": "IN"}, {"OUT": "OUT"})], io)

    async def main() -> None:
        async with serving(tmp_path, startup=("whole",), cache_bytes=10_000) as server:
            assert [await server.numbers("whole", ONE) for _ in range(2)] == [[[4.0]]] * 2
            assert server.view("whole", "").config.cache
            write(tmp_path, "double", config(), DOUBLE.replace("* 2", "* 30"))
            await server.load(loaded, {})
            assert await server.numbers("twice", ONE) == [[32.0]]
            assert await server.numbers("whole", ONE) == [[32.0]]

    asyncio.run(main())


def test_unloading_a_version_of_a_called_model_invalidates_cached_responses(tmp_path: Path) -> None:
    both = config("version_policy { all {} }")
    write(tmp_path, "double", both, DOUBLE)
    write(tmp_path, "double", both, DOUBLE.replace("* 2", "* 30"), (2,))
    write(tmp_path, "once", calls("double") + "response_cache { enable: true }", CALLS.replace("{name}", "double"))

    async def main() -> None:
        async with serving(tmp_path, startup=("once",), cache_bytes=10_000) as server:
            assert await server.numbers("once", ONE) == [[31.0]]
            await server.unload("double", False, "2")
            assert await server.numbers("once", ONE) == [[3.0]]

    asyncio.run(main())


def test_unavailable_called_models_are_reported_at_load(tmp_path: Path) -> None:
    caller(tmp_path, "lacks", "nobody")
    caller(tmp_path, "egg", "hen")
    caller(tmp_path, "hen", "egg")
    write(tmp_path, "broken", config(), "    raise ValueError('no')\n")
    caller(tmp_path, "hopes", "broken")

    async def main() -> None:
        async with serving(tmp_path, startup=("*",)) as server:
            assert server.index(True) == []
            assert not server.ready
            said = {entry.name: entry.reason for entry in server.index(False)}
            assert said["lacks"] == "model lacks calls models that are not available or ambiguous: nobody"
            assert said["egg"] == "circular dependency between models: egg -> ... -> hen -> egg"
            assert "model 'hopes' calls 'broken' which has no loaded version." in said["hopes"]
            with pytest.raises(Refused, match="calls models that are not available or ambiguous: nobody"):
                await server.load("lacks", {})

    asyncio.run(main())


def test_model_can_list_itself_as_called(tmp_path: Path) -> None:
    write(tmp_path, "double", config(), DOUBLE)
    caller(tmp_path, "self", "double", "self")

    async def main() -> None:
        async with serving(tmp_path, startup=("self",)) as server:
            assert numbers(await server.ask("self", ONE).one()) == [[3.0]]

    asyncio.run(main())


def test_model_can_load_unload_and_check_other_models(tmp_path: Path) -> None:
    write(tmp_path, "double", config(), DOUBLE)
    source = (tmp_path / "double" / "1" / "model.py").read_bytes()
    write(tmp_path, "keeper", config(), KEEPER.replace("SOURCE", repr(source + IO_OF_7)))

    async def main() -> None:
        async with serving(tmp_path, startup=("keeper",)) as server:
            said = [await server.numbers("keeper", tensor("IN", [[float(step)]])) for step in (0, 1, 2, 3)]
            assert said == [[[0.0]], [[1.0]], [[0.0]], [[3.0]]]
            refused = await server.ask("keeper", tensor("IN", [[4.0]])).error()
            assert refused.text == "refused: failed to load 'nobody', failed to poll from model repository"
        async with serving(tmp_path, control=Control.NONE) as server:
            refused = await server.ask("keeper", tensor("IN", [[1.0]])).error()
            assert refused.text == "refused: explicit model load / unload is not allowed if polling is enabled"

    asyncio.run(main())

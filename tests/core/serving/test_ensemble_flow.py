"""One request of an ensemble."""

import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from forebay.core.serving.config import Datatype, ModelConfig, Step, TensorSpec
from forebay.core.serving.ensemble import Dag, Flow, Gates, Progress, carried_shape
from forebay.core.serving.ensemble.flow import PLANS_MAX

DEADLOCK = (
    "in ensemble 'e', unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
)


def dag(inputs: str, outputs: str, *steps: str) -> Dag:
    """`xy>t` is a step that reads x and y and makes t; `x>>t` is a decoupled one. Models are called m0, m1, …

    Their inputs and outputs are called like the ensemble's tensors, in capitals.
    """
    specs = {name: TensorSpec(name, Datatype.FP32, (1,)) for name in inputs + outputs}
    made = [step.replace(">>", ">").split(">") for step in steps]
    config = ModelConfig(
        "e", "ensemble", inputs=tuple(specs[name] for name in inputs), outputs=tuple(specs[name] for name in outputs),
        steps=tuple(
            Step(f"m{n}", -1, {each.upper(): each for each in read}, {each.upper(): each for each in written})
            for n, (read, written) in enumerate(made)
        ),
    )  # fmt: skip
    return Dag(config, [">>" in step for step in steps])


def told(progress: Progress[str]) -> dict[str, object]:
    """What is to be done, without what is not."""
    names = ("starts", "responses", "ended", "error", "cancel")
    return {name: value for name in names if (value := getattr(progress, name))}


def starts(progress: Progress[str]) -> list[tuple[int, dict[str, str]]]:
    return [(start.step, start.inputs) for start in progress.starts]


def test_step_starts_once_all_its_inputs_are_there() -> None:
    flow: Flow[str] = Flow(dag("x", "z", "x>t", "x>u", "tu>z"))
    assert starts(flow.begin({"x": "1"})) == [(0, {"X": "1"}), (1, {"X": "1"})]
    assert told(flow.result(2, {"U": "3"}, final=True)) == {}
    assert starts(flow.result(1, {"T": "2"}, final=True)) == [(2, {"T": "2", "U": "3"})]
    assert told(flow.result(3, {"Z": "4"}, final=True)) == dict(responses=[{"z": "4"}], ended=True)


def test_tensor_is_kept_no_longer_than_until_its_last_reader_starts() -> None:
    class Value:
        pass

    value = Value()
    kept = weakref.ref(value)
    flow: Flow[Value] = Flow(dag("xy", "z", "x>t", "xy>u", "tu>z"))
    said = flow.begin({"x": value})
    del value, said
    assert kept() is None


def test_steps_not_needed_for_requested_outputs_do_not_run() -> None:
    graph = dag("xy", "vw", "x>tu", "t>v", "yu>w")
    flow: Flow[str] = Flow(graph, ["v"])
    assert starts(flow.begin({"x": "1", "y": "2"})) == [(0, {"X": "1"})]
    assert starts(flow.result(1, {"T": "3", "U": "4"}, final=True)) == [(1, {"T": "3"})]
    assert told(flow.result(2, {"V": "5"}, final=True)) == dict(responses=[{"v": "5"}], ended=True)


def test_empty_responses_and_late_ones() -> None:
    flow: Flow[str] = Flow(dag("xy", "vw", "x>v", "y>w"), ["v"])
    flow.begin({"x": "1"})
    assert told(flow.result(1, {}, final=True)) == dict(responses=[{}], ended=True)
    assert told(flow.result(1, {"V": "2"}, final=True)) == {}


def test_an_input_may_be_an_output_too() -> None:
    flow: Flow[str] = Flow(dag("x", "xv", "x>v"), ["x"])
    assert told(flow.begin({"x": "1"})) == dict(responses=[{"x": "1"}], ended=True)


def test_optional_tensors_that_are_missing_are_left_out() -> None:
    flow: Flow[str] = Flow(dag("xy", "z", "xy>tu", "tu>z"))
    assert starts(flow.begin({"x": "1"})) == [(0, {"X": "1"})]
    assert starts(flow.result(1, {"U": "2"}, final=True)) == [(1, {"U": "2"})]


def test_responses_of_a_decoupled_step_pass_through_in_order() -> None:
    flow: Flow[str] = Flow(dag("x", "z", "x>>t", "t>z"))
    flow.begin({"x": "0"})
    assert starts(flow.result(1, {"T": "a"}, final=False)) == [(1, {"T": "a"})]
    assert starts(flow.result(1, {"T": "b"}, final=False)) == [(1, {"T": "b"})]
    assert told(flow.result(1, None, final=True)) == {}
    assert told(flow.result(3, {"Z": "B"}, final=True)) == {}
    assert told(flow.result(2, {"Z": "A"}, final=True)) == dict(responses=[{"z": "A"}, {"z": "B"}], ended=True)


def test_only_decoupled_steps_may_have_no_response() -> None:
    flow: Flow[str] = Flow(dag("x", "z", "x>>z"))
    flow.begin({"x": "0"})
    assert told(flow.result(1, None, final=True)) == dict(ended=True)
    flow = Flow(dag("x", "z", "x>t", "xt>z"))
    flow.begin({"x": "0"})
    assert told(flow.result(1, None, final=True)) == dict(ended=True, error=DEADLOCK)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no memory", "in ensemble 'e', step of model 'm0': no memory"),
        ("inference of model 'm0' failed", "in ensemble 'e', inference of model 'm0' failed"),
    ],
)
def test_a_failing_step_ends_the_ensemble_and_is_named(text: str, error: str) -> None:
    flow: Flow[str] = Flow(dag("x", "z", "x>t", "x>u", "x>v", "tuv>z"))
    flow.begin({"x": "1"})
    flow.result(3, {"V": "2"}, final=True)
    assert told(flow.fail(1, text)) == dict(ended=True, error=error, cancel=[2])
    assert told(flow.fail(1, text)) == {}
    assert told(flow.result(2, {"U": "3"}, final=True)) == {}
    assert told(flow.abandon()) == {}


def test_only_the_first_failure_of_an_ensemble_is_reported() -> None:
    flow: Flow[str] = Flow(dag("x", "z", "x>t", "x>u", "tu>z"))
    flow.begin({"x": "1"})
    assert told(flow.abandon()) == dict(cancel=[1, 2])
    assert told(flow.fail(2, "cancelled")) == {}
    assert told(flow.fail(1, "cancelled")) == {}


def test_cached_ensemble_plans_are_bounded() -> None:
    outputs = "abcdefgh"
    graph = dag("x", outputs, f"x>{outputs}")
    wanted = [[a, b] for a in outputs for b in outputs] + [[a, b, "h"] for a in outputs for b in outputs]
    for each in wanted:
        assert Flow[str](graph, each).begin({"x": "1"}).starts
    assert len(graph._plans) == PLANS_MAX
    assert graph.plan(wanted[0]) is graph.plan(wanted[0])
    assert [name for name, _ in graph.plan([]).wanted] == list(outputs)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Steps, and what to ask for: all of one region, as `check` sees to."""
    steps: list[str] = []
    regions = {0: ["x", "y"]}
    names = iter("abcdefghijklmnop")
    for n in range(draw(st.integers(1, 6))):
        region = draw(st.sampled_from(sorted(regions)))
        read = draw(st.lists(st.sampled_from(regions[region]), min_size=1, max_size=3, unique=True))
        decoupled = draw(st.booleans())
        made = [next(names) for _ in range(draw(st.integers(1, 2)))]
        steps.append(f"{''.join(read)}{'>>' if decoupled else '>'}{''.join(made)}")
        regions.setdefault(n + 1 if decoupled else region, []).extend(made)
    able = {region: [each for each in names if each not in "xy"] for region, names in regions.items()}
    chosen = draw(st.sampled_from(sorted(region for region, names in able.items() if names)))
    return steps, draw(st.lists(st.sampled_from(able[chosen]), min_size=1, max_size=3, unique=True))


def expected(steps: Sequence[str], told: dict[str, list[str]], tensor: str, turn: int) -> str:
    """The value of a tensor: what decoupled steps were `told` to give, and what follows from that."""
    if tensor in told:
        return told[tensor][turn]
    for n, step in enumerate(steps):
        read, made = step.split(">", 1)
        if tensor in made:
            return f"{tensor}{n}({','.join(expected(steps, told, each, turn) for each in read)})"
    return tensor


def _follows(steps: Sequence[str], tensor: str, decoupled: str) -> bool:
    """Whether the last decoupled step before `tensor` (or its own) is that which makes `decoupled`."""
    for step in steps:
        read, made = step.replace(">>", ">").split(">")
        if tensor in made:
            return decoupled in made if ">>" in step else _follows(steps, read[0], decoupled)
    return False


class Play:
    """A request on its way: values are their own derivation."""

    def __init__(self, steps: Sequence[str], wanted: Sequence[str]) -> None:
        self.steps = steps
        self.flow: Flow[str] = Flow(dag("xy", "".join(wanted), *steps), wanted)
        self.told: dict[str, list[str]] = {each: [] for step in steps if ">>" in step for each in step.split(">>")[1]}
        self.given = 0
        self.running: dict[int, tuple[int, dict[str, str]]] = {}
        self.responses: list[dict[str, str]] = []
        self.over = self.ended = False
        self.follow(self.flow.begin({"x": "x", "y": "y"}))

    def follow(self, progress: Progress[str]) -> None:
        assert not self.over or not (progress.starts or progress.responses or progress.ended)
        assert not (self.ended and progress.ended)
        assert progress.ended or not progress.error
        self.running.update({start.run: (start.step, start.inputs) for start in progress.starts})
        self.responses += progress.responses
        self.ended = self.ended or progress.ended

    def give(self, run: int) -> None:
        """The run has a response; if its step is not decoupled, that is its end."""
        n, inputs = self.running[run]
        decoupled = ">>" in self.steps[n]
        read, made = self.steps[n].replace(">>", ">").split(">")
        arguments = ",".join(inputs[each.upper()] for each in read)
        self.given += 1
        outputs = {}
        for tensor in made:
            value = f"{tensor}{n}({arguments})" + (f"#{self.given}" if decoupled else "")
            outputs[tensor.upper()] = value
            if decoupled and not self.over:
                self.told[tensor].append(value)
        if not decoupled:
            del self.running[run]
        self.follow(self.flow.result(run, outputs, final=not decoupled))

    def end(self, run: int) -> None:
        del self.running[run]
        self.follow(self.flow.result(run, None, final=True))

    def break_off(self, run: int, fails: bool) -> None:
        if fails:
            del self.running[run]
        self.follow(self.flow.fail(run, "no") if fails else self.flow.abandon())
        assert self.ended is fails
        self.over = True


@settings(max_examples=examples(300))
@given(graph=graphs(), data=st.data(), breaks=st.booleans())
def test_ensemble_outputs_follow_the_graph_and_nothing_is_kept_at_the_end(
    graph: tuple[list[str], list[str]], data: st.DataObject, breaks: bool
) -> None:
    steps, wanted = graph
    play = Play(steps, wanted)
    while play.running:
        run = data.draw(st.sampled_from(sorted(play.running)))
        if breaks and not play.over and data.draw(st.integers(0, 9)) == 0:
            play.break_off(run, data.draw(st.booleans()))
        elif ">>" in steps[play.running[run][0]] and (play.given > 40 or data.draw(st.booleans())):
            play.end(run)
        else:
            play.give(run)
    assert play.ended or play.over
    if not play.over:
        turns = next((len(values) for each, values in play.told.items() if _follows(steps, wanted[0], each)), 1)
        assert play.responses == [
            {name: expected(steps, play.told, name, turn) for name in wanted} for turn in range(turns)
        ]
    assert not play.flow._turns
    assert not play.flow._runs


def test_inflight_limit_of_a_step_queues_runs_in_order() -> None:
    gates: Gates[str] = Gates(2, steps=2)
    assert [gates.enter(0, key) for key in "abcde"] == [True, True, False, False, False]
    assert gates.enter(1, "a")
    assert [gates.drop(0, "d"), gates.drop(0, "a")] == [True, False]
    assert [gates.leave(0) for _ in range(4)] == ["c", "e", None, None]
    assert gates.enter(0, "f")
    free: Gates[str] = Gates(0, steps=1)
    assert [free.enter(0, key) for key in "abc"] == [True, True, True]
    assert free.leave(0) is None


@pytest.mark.parametrize(
    ("shape", "made_rows", "dims", "batches", "carried"),
    [
        ((2, 4), 2, (4,), True, (2, 4)),
        ((4,), 0, (4,), False, (4,)),
        ((4,), 0, (4,), True, (1, 4)),
        ((4,), 0, (-1,), True, (1, 4)),
        ((2, 4), 0, (4,), True, (2, 4)),
        ((1, 4), 1, (4,), False, (4,)),
        ((2, 4), 2, (-1, 4), False, (2, 4)),
        ((1, 4), 1, (-1, 4), False, (1, 4)),
        ((2, 4), 2, (4,), False, (2, 4)),
    ],
)
def test_batch_dimension_is_added_or_removed_between_steps(
    shape: tuple[int, ...], made_rows: int, dims: tuple[int, ...], batches: bool, carried: tuple[int, ...]
) -> None:
    assert carried_shape(shape, made_rows, dims, batches) == carried

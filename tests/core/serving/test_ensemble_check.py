"""Validation of ensembles."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import (
    IN_PROCESS,
    Datatype,
    InstanceGroup,
    ModelConfig,
    Resource,
    SequenceBatching,
    Step,
    TensorSpec,
    Warmup,
)
from forebay.core.serving.ensemble import Lookup, abreast, check, lacks, load_order


def spec(name: str, *dims: int, datatype: Datatype = Datatype.FP32, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, dims, optional=optional)


def model(
    name: str, inputs: str = "I", outputs: str = "O", max_batch: int = 8, decoupled: bool = False
) -> ModelConfig:
    return ModelConfig(
        name, "python", "", max_batch, tuple(spec(each, 4) for each in inputs),
        tuple(spec(each, 4) for each in outputs), decoupled=decoupled,
    )  # fmt: skip


def lookup(*models: ModelConfig) -> Lookup:
    """Version 1 of each is loaded."""
    known = {each.name: each for each in models}
    return lambda name, version: known.get(name) if version in {-1, 1} else None


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> Step:
    return Step(model, version, dict(inputs), dict(outputs))


FIRST, SECOND = step("a", {"I": "x"}, {"O": "t"}), step("b", {"I": "t"}, {"O": "y"})
GOOD = ModelConfig("e", "ensemble", "", 8, (spec("x", 4),), (spec("y", 4),), steps=(FIRST, SECOND))
MODELS = (model("a"), model("b"))
THIRD = 2
UNWRITTEN = "output 'y' for ensemble 'e' is not written"
ROUND = "circular dependency between ensembles: "


def test_valid_ensemble_has_no_problems() -> None:
    assert check(GOOD, lookup(*MODELS)) == ((), (False, False), False)


def test_ensemble_with_a_decoupled_step_is_decoupled() -> None:
    assert check(GOOD, lookup(model("a"), model("b", decoupled=True))) == ((), (False, True), True)


@pytest.mark.parametrize(
    ("steps", "problems"),
    [
        ((), ["must specify 'step' for ensemble 'e'", "ensemble input 'x' for ensemble e' is not used",
              "ensemble output 'y' for ensemble e' is not used"]),
        ((FIRST, SECOND, step("", {}, {})), [
            f"must specify 'model_name' in step {THIRD} of ensemble 'e'",
            f"must specify 'input_map' in step {THIRD} of ensemble 'e'",
            f"must specify 'output_map' in step {THIRD} of ensemble 'e'",
            "ensemble 'e' depends on '' which has no loaded version."]),
        ((FIRST, SECOND, step("a", {"I": "x"}, {"O": "y"})),
         [f"ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step {THIRD}"]),
        ((FIRST, SECOND, step("a", {"I": "t"}, {"O": "x"})),
         [f"ensemble tensor 'x' can appear in an output map only once for ensemble 'e' step {THIRD}"]),
        ((FIRST, step("b", {"I": "q"}, {"O": "y"})), [
            UNWRITTEN + ": at least one of its depending tensors, 'q', is not connected",
            "ensemble tensor 'q' is unused in ensemble 'e'", "ensemble tensor 't' is unused in ensemble 'e'"]),
        ((FIRST, step("b", {"I": "y"}, {"O": "y"})), [
            "circular dependency in ensemble 'e': 'y', which needs 'y'",
            UNWRITTEN, "ensemble tensor 't' is unused in ensemble 'e'"]),
        ((step("c", {"I": "x", "J": "y"}, {"O": "t"}), SECOND), [
            "circular dependency in ensemble 'e': 't', which needs 'y', which needs 't'",
            UNWRITTEN + ": at least one of its depending tensors, 't', is not connected",
            "ensemble tensor 't' is unused in ensemble 'e'",
            "ensemble 'e' depends on 'c' which has no loaded version."]),
        ((FIRST, replace(SECOND, version=3)),
         ["ensemble 'e' depends on 'b' whose required version 3 is not loaded."]),
        ((FIRST, replace(SECOND, version=1)), []),
        ((FIRST, step("b", {"I": "t", "J": "x"}, {"O": "y", "P": "x2"}), step("a", {"I": "x2"}, {"O": "x3"})), [
            "ensemble tensor 'x3' is unused in ensemble 'e'",
            "in ensemble e, ensemble tensor x is mapping to non-existing input J in model b",
            "in ensemble e, ensemble tensor x2 is mapped from non-existing output P in model b"]),
        ((FIRST, step("two", {"I": "t"}, {"O": "y"})),
         ["in ensemble e, input J in model two is not mapped to any ensemble tensors"]),
        ((FIRST, step("optional", {"I": "t"}, {"O": "y"})), []),
        ((FIRST, step("small", {"I": "t"}, {"O": "y"})),
         ["ensemble e allows maximum batch size 8, but it contains model small which only allows maximum batch size"
          " to be 4"]),
        ((FIRST, step("text", {"I": "t"}, {"O": "y"})),
         ["in ensemble e, ensemble tensor t: inconsistent data type: TYPE_FP32 is inferred from model a while"
          " TYPE_STRING is inferred from model text"]),
        ((FIRST, step("wide", {"I": "t"}, {"O": "y"})),
         ["in ensemble e, ensemble tensor t: inconsistent shape: [-1,4] is inferred from model a while [-1,4,2] is"
          " inferred from model wide"]),
        ((FIRST, step("single", {"I": "t"}, {"O": "y"})), []),
    ],
)  # fmt: skip
def test_ensemble_problems_have_the_error_messages_of_triton(steps: tuple[Step, ...], problems: list[str]) -> None:
    others = (
        model("two", "IJ"),
        replace(model("optional", "I"), inputs=(spec("I", 4), spec("J", 4, optional=True))),
        model("small", max_batch=4),
        replace(model("text"), inputs=(spec("I", 4, datatype=Datatype.BYTES),)),
        replace(model("wide"), inputs=(spec("I", 4, 2),)),
        replace(model("single", max_batch=0), inputs=(spec("I", -1, 4),), outputs=(spec("O", -1, -1),)),
    )
    assert list(check(replace(GOOD, steps=steps), lookup(*MODELS, *others)).problems) == problems


def test_ensemble_rejects_warm_up_and_applies_reshapes() -> None:
    config = replace(
        GOOD, warmups=(Warmup("w", 1, {}),), inputs=(TensorSpec("x", Datatype.FP32, (2, 2), reshape=(4,)),)
    )
    assert check(config, lookup(*MODELS)).problems == ("model_warmup can not be specified for ensemble 'e'",)


def test_tensors_of_different_decoupled_steps_may_not_be_combined() -> None:
    models = lookup(model("a", decoupled=True), model("b"), model("c", "IJ"))
    text = "in ensemble e, step of model '{}' receives inputs originated from different decoupled models"
    join = step("c", {"I": "t", "J": "x"}, {"O": "y"})
    assert check(replace(GOOD, steps=(FIRST, join)), models).problems == (text.format("c"),)
    side = replace(
        GOOD, steps=(FIRST, SECOND, step("b", {"I": "x"}, {"O": "z"})), outputs=(spec("y", 4), spec("z", 4))
    )
    assert check(side, models).problems == (text.format("e"),)
    assert check(replace(GOOD, steps=(FIRST, SECOND)), models).problems == ()


@pytest.mark.parametrize(
    ("needs", "order", "problems"),
    [
        ({"e": {"b", "f"}, "f": {"a"}, "a": (), "b": ()}, ["a", "b", "f", "e"], {}),
        (
            {"e": {"f"}, "f": {"a", "z", "y"}, "a": ()}, ["a"],
            {
                "f": "ensemble f contains models that are not available or ambiguous: y, z",
                "e": "ensemble 'e' depends on 'f' which is not valid. Model 'f' failed with error: ensemble f"
                " contains models that are not available or ambiguous: y, z",
            },
        ),
        ({"e": {"e"}}, [], {"e": ROUND + "e -> ... -> e -> e"}),
        (
            {"e": {"f"}, "f": {"g", "a"}, "g": {"e"}, "h": {"g"}, "a": ()}, ["a"],
            {
                "e": ROUND + "e -> ... -> g -> e",
                "f": ROUND + "f -> ... -> e -> f",
                "g": ROUND + "g -> ... -> f -> g",
                "h": "ensemble 'h' depends on 'g' which is not valid. Model 'g' failed with error: "
                f"{ROUND}g -> ... -> f -> g",
            },
        ),
    ],
)  # fmt: skip
def test_load_order_puts_models_before_their_ensembles(
    needs: dict[str, set[str]], order: list[str], problems: dict[str, str]
) -> None:
    assert load_order(needs) == (order, problems)


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdefg"), max_size=3)))
def test_load_order_contains_every_model_without_a_problem(needs: dict[str, set[str]]) -> None:
    order, problems = load_order(needs)
    assert sorted([*order, *problems]) == sorted(needs)
    for index, name in enumerate(order):
        assert needs[name] <= set(order[:index])


CALLER = replace(model("c"), parameters={"forebay.calls": " b, a,b,c, "})


def test_declared_calls_are_dependencies_of_a_model() -> None:
    assert CALLER.needs == ("b", "a")
    assert GOOD.needs == ("a", "b")
    assert lacks(CALLER, lookup(*MODELS)) == ()
    assert lacks(CALLER, lookup(model("a"))) == ("model 'c' calls 'b' which has no loaded version.",)
    assert lacks(GOOD, lookup(model("a"))) == ("ensemble 'e' depends on 'b' which has no loaded version.",)


def test_missing_and_circular_dependencies_of_models_are_reported() -> None:
    order, problems = load_order({"a": {"b"}, "b": {"a"}, "c": {"d"}, "e": {"c"}}, {"a", "b", "c", "e"})
    assert order == []
    assert problems["a"] == "circular dependency between models: a -> ... -> b -> a"
    assert problems["c"] == "model c calls models that are not available or ambiguous: d"
    assert problems["e"].startswith("model 'e' depends on 'c' which is not valid. Model 'c' failed with error: ")


TENSORS = st.sets(st.sampled_from("xypqr"), min_size=1, max_size=2)


@given(st.lists(st.tuples(TENSORS, TENSORS), max_size=5))
def test_circular_and_duplicate_tensors_of_any_steps_are_found(steps: list[tuple[set[str], set[str]]]) -> None:
    joined = tuple(
        step("a", dict(zip("IJ", sorted(given), strict=False)), dict(zip("OP", sorted(made), strict=False)))
        for given, made in steps
    )
    problems = check(replace(GOOD, steps=joined), lookup(model("a", "IJ", "OP"))).problems
    alone = [given & made for given, made in steps if given & made - {"x"}]
    assert not alone or any("circular dependency" in each or "only once" in each for each in problems)


def test_concurrency_of_a_model_is_its_number_of_instances() -> None:
    two = replace(model("b"), instances=(InstanceGroup(count=2),))
    assert abreast(two, lookup()) == 2
    assert abreast(GOOD, lookup(model("a"), two)) == 3
    assert abreast(replace(GOOD, inflight_max=1), lookup(model("a"), two)) == 2
    assert abreast(GOOD, lookup()) == 1


def test_steps_in_one_process_must_be_plain_models() -> None:
    whole = replace(GOOD, parameters={IN_PROCESS: "true"})
    plain = (replace(model("a"), backend="onnxruntime"), model("b"))
    assert check(whole, lookup(*plain)).problems == ()
    assert abreast(whole, lookup(*plain)) == 1
    start = "ensemble 'e' has forebay.in_process, "
    assert check(whole, lookup(*MODELS)).problems == (
        f"{start}but 2 of its models are of the python backend; only one can be",
    )
    limited = check(replace(whole, inflight_max=1), lookup(*plain)).problems
    assert limited == (
        f"{start}and max_inflight_requests, which limits the requests to the models of other processes",
    )
    resources = (InstanceGroup(resources=(Resource("R", 1),)),)
    odd: dict[str, dict[str, Any]] = {
        "is an ensemble": {"backend": "ensemble"},
        "is decoupled": {"decoupled": True},
        "has sequence_batching": {"sequences": SequenceBatching()},
        "does not batch, unlike the ensemble": {"max_batch": 0},
        "has tensors with reshape": {"inputs": (replace(spec("I", 4), reshape=(2, 2)),)},
        "has rate_limiter resources": {"instances": resources},
    }
    for reason, change in odd.items():
        changed = replace(plain[0], **change)
        assert f"{start}but model 'a' of its steps {reason}" in check(whole, lookup(changed, plain[1])).problems
    assert check(whole, lookup(plain[0])).problems == ("ensemble 'e' depends on 'b' which has no loaded version.",)

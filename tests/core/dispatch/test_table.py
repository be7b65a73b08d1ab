"""Which model a request goes to: names, rules, revisions, and fallbacks."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch import Chosen, Facts, Table, fall_back, make_table, may_fall_back, resolve, split, unfold
from forebay.core.model import Condition, Dispatch, ModelRoutes, Policy, Rule, StandIn, Task, When

FREE, SATURATED, DOWN = Condition.FREE, Condition.SATURATED, Condition.DOWN


def model(name: str, task: Task = Task.CHAT, **more: Any) -> ModelRoutes:
    return ModelRoutes(name, task, Policy.CPR, "r-1", 8, 1.0, **more)


MODELS = (
    model("big", price_per_mtok=3.0, fallback=(StandIn("small"), StandIn("tiny", (DOWN,)))),
    model("small", price_per_mtok=0.5),
    model("tiny"),
    model("embed", Task.EMBED),
)


def table(*rules: Rule, **aliases: str) -> Table:
    return make_table(Dispatch(aliases, rules), MODELS)


def facts(name: str = "auto", **more: Any) -> Facts:
    return Facts(**{"name": name, "task": Task.CHAT, **more})


# --- names


def test_model_is_found_by_its_name_and_unknown_names_are_not() -> None:
    assert resolve(table(), facts("big")) == Chosen("big", "the name asked for")
    assert resolve(table(), facts("none")) is None
    assert table().plain == {"big", "small", "tiny", "embed"}


def test_an_alias_stands_for_a_model_or_for_a_name_with_rules() -> None:
    named = table(Rule("auto", "small"), best="big", any="auto", lost="nothing")
    assert resolve(named, facts("best")) == Chosen("big", "best is an alias of it")
    assert resolve(named, facts("any")) == Chosen("small", "routes[0]")
    assert resolve(named, facts("lost")) is None


def test_named_revision_of_a_model_or_alias_skips_rules() -> None:
    named = table(Rule("big", "small"), Rule("auto", "tiny", "r-7"), best="big")
    assert resolve(named, facts("big@r-9")) == Chosen("big", "the revision asked for", "r-9")
    assert resolve(named, facts("best@r-9")) == Chosen("big", "the revision asked for", "r-9")
    assert resolve(named, facts("auto@r-9")) is None
    assert resolve(named, facts("auto")) == Chosen("tiny", "routes[1]", "r-7")
    assert split("big@r@1") == ("big", "r@1")
    assert split("big") == ("big", "")


NAMES = st.sampled_from("abcdef")


@given(st.dictionaries(NAMES, NAMES | st.just("model")))
def test_every_alias_resolves_or_is_in_a_cycle(aliases: dict[str, str]) -> None:
    ends, circles = unfold(aliases)

    on_circles = {name for circle in circles for name in circle}
    assert len(on_circles) == sum(map(len, circles))
    for circle in circles:
        assert [aliases[name] for name in circle] == [*circle[1:], circle[0]]
    assert not set(ends.values()) & aliases.keys()
    for alias in aliases:
        at, steps = alias, 0
        while at in aliases and steps <= len(aliases):
            at, steps = aliases[at], steps + 1
        assert ends.get(alias) == (at if at not in aliases else None)
        assert (alias in ends) != (steps > len(aliases))


# --- rules


@pytest.mark.parametrize(
    ("when", "fits", "fails"),
    [
        (When(), {}, None),
        (When(task=Task.CHAT), {}, {"task": Task.EMBED}),
        (When(prompt_tokens_min=10), {"prompt_tokens": 10}, {"prompt_tokens": 9}),
        (When(prompt_tokens_max=10), {"prompt_tokens": 10}, {"prompt_tokens": 11}),
        (When(tenant="bob"), {"tenant": "bob"}, {"tenant": "bobby"}),
        (When(header="x-a"), {"headers": {"x-a": ""}}, {"headers": {"x-b": "1"}}),
        (When(header="x-a", header_value="on"), {"headers": {"x-a": "on"}}, {"headers": {"x-a": "one"}}),
        (When(header="x-a", header_prefix="on"), {"headers": {"x-a": "one"}}, {"headers": {"x-a": "o"}}),
        (When(budget_ms_below=50), {"budget_ms": 49.9}, {"budget_ms": 50}),
        (When(budget_ms_above=50), {"budget_ms": 50.1}, {"budget_ms": 50}),
        (When(within_max_cost=True), {"cost_max": 0.5}, {"cost_max": 0.49}),
    ],
)
def test_rule_matches_when_its_condition_holds(
    when: When, fits: dict[str, Any], fails: dict[str, Any] | None
) -> None:
    ruled = table(Rule("auto", "small", when=when))
    assert resolve(ruled, facts(**fits)) == Chosen("small", "routes[0]")
    if fails is not None:
        assert resolve(ruled, facts(**fails)) is None


def test_rule_for_another_task_than_its_model_never_matches() -> None:
    assert resolve(table(Rule("auto", "small", when=When(task=Task.EMBED))), facts()) is None


def test_models_of_further_tasks_serve_only_what_no_other_rule_does() -> None:
    also = (Task.EMBED,)
    ruled = table(Rule("auto", "embed"), Rule("auto", "small", when=When(tenant="bob")))
    assert resolve(ruled, facts()) is None
    assert resolve(ruled, facts(also=also)) == Chosen("embed", "routes[0]")
    assert resolve(ruled, facts(also=also, tenant="bob")) == Chosen("small", "routes[1]")
    assert resolve(table(Rule("auto", "embed", when=When(task=Task.EMBED))), facts(also=also)) is not None


def test_missing_budget_is_unbounded_and_unknown_price_fits_no_budget() -> None:
    assert resolve(table(Rule("auto", "small", when=When(budget_ms_above=1e9))), facts()) is not None
    assert resolve(table(Rule("auto", "small", when=When(budget_ms_below=1e9))), facts()) is None
    unpriced = table(Rule("auto", "tiny", when=When(within_max_cost=True)))
    assert resolve(unpriced, facts()) is not None
    assert resolve(unpriced, facts(cost_max=1e9)) is None


def test_first_rule_with_all_conditions_met_applies() -> None:
    ruled = table(
        Rule("other", "tiny"),
        Rule("auto", "big", when=When(tenant="bob", prompt_tokens_min=10)),
        Rule("auto", "small", when=When(tenant="bob")),
        Rule("auto", "tiny"),
    )
    assert resolve(ruled, facts(tenant="bob", prompt_tokens=10)) == Chosen("big", "routes[1]")
    assert resolve(ruled, facts(tenant="bob", prompt_tokens=9)) == Chosen("small", "routes[2]")
    assert resolve(ruled, facts(prompt_tokens=10)) == Chosen("tiny", "routes[3]")


def test_model_with_rules_serves_requests_without_a_match() -> None:
    ruled = table(Rule("big", "small", when=When(prompt_tokens_max=5)))
    assert "big" not in ruled.plain
    assert resolve(ruled, facts("big", prompt_tokens=5)) == Chosen("small", "routes[0]")
    assert resolve(ruled, facts("big", prompt_tokens=6)) == Chosen("big", "the name asked for")


def test_name_with_rules_serves_models_of_several_tasks() -> None:
    ruled = table(Rule("auto", "embed"), Rule("auto", "small"), Rule("auto", "gone"))
    assert resolve(ruled, facts(task=Task.EMBED)) == Chosen("embed", "routes[0]")
    assert resolve(ruled, facts(task=Task.CHAT)) == Chosen("small", "routes[1]")


def test_dispatch_table_lists_the_headers_used_by_rules() -> None:
    ruled = table(
        Rule("a", "big", when=When(header="x-b")), Rule("b", "big", when=When(header="x-a")), Rule("c", "big")
    )
    assert ruled.headers == ("x-a", "x-b")


# --- stepping in

BIG = Chosen("big", "the name asked for")


@pytest.mark.parametrize(
    ("states", "model"),
    [
        ({"big": SATURATED, "small": FREE, "tiny": FREE}, "small"),
        ({"big": DOWN, "small": FREE, "tiny": FREE}, "small"),
        ({"big": DOWN, "small": SATURATED, "tiny": FREE}, "tiny"),
        ({"big": DOWN, "tiny": FREE}, "tiny"),
        ({"big": SATURATED, "small": DOWN, "tiny": FREE}, None),
        ({"big": DOWN, "small": DOWN, "tiny": SATURATED}, None),
        ({"big": FREE, "small": FREE}, None),
        ({"small": FREE}, None),
    ],
)
def test_first_available_fallback_for_the_reason_is_chosen(states: dict[str, Condition], model: str | None) -> None:
    found = fall_back(table(), BIG, states)
    assert (found.model if found else None) == model
    if found:
        assert found.why == f"big is {states['big']}"
        assert found.before == ("big",)


def test_no_fallback_for_a_named_revision_or_a_model_without_fallbacks() -> None:
    states = {"big": DOWN, "small": FREE, "tiny": DOWN}
    assert fall_back(table(), BIG._replace(revision="r-1"), states) is None
    assert fall_back(table(), Chosen("tiny", ""), states) is None
    assert fall_back(table(), Chosen("gone", ""), states) is None


def test_a_second_fallback_is_chosen_by_the_first_reason() -> None:
    first = fall_back(table(), BIG, {"big": DOWN, "small": FREE})
    assert first is not None
    second = fall_back(table(), first, {"big": FREE, "small": SATURATED, "tiny": FREE})
    assert second == Chosen("tiny", "big is down", "", ("big", "small"), DOWN)
    other = fall_back(table(), first._replace(trouble=SATURATED), {"big": DOWN, "small": DOWN, "tiny": FREE})
    assert other is None


def test_caller_can_override_the_fallback() -> None:
    default_no = replace(MODELS[0], fallback_default=False)
    assert may_fall_back(MODELS[0], None)
    assert not may_fall_back(default_no, None)
    assert may_fall_back(default_no, " Allow ")
    assert not may_fall_back(MODELS[0], "deny")
    assert not may_fall_back(MODELS[0], "perhaps")


# --- anything

MODEL_NAMES = ["m0", "m1", "m2", "m3", "gone"]
STAND_INS = st.lists(
    st.builds(StandIn, st.sampled_from(MODEL_NAMES), st.lists(st.sampled_from([SATURATED, DOWN])).map(tuple)),
    max_size=6,
).map(tuple)
ROUTES = st.lists(st.tuples(st.sampled_from(list(Task)), STAND_INS), min_size=4, max_size=4)
RULES = st.lists(
    st.builds(
        Rule,
        st.sampled_from(["auto", *MODEL_NAMES]),
        st.sampled_from(MODEL_NAMES),
        when=st.builds(When, task=st.none() | st.sampled_from(list(Task)), prompt_tokens_min=st.integers(0, 3)),
    ),
    max_size=6,
).map(tuple)


ANY_FACTS = st.builds(Facts, st.sampled_from(["auto", *MODEL_NAMES]), st.sampled_from(list(Task)), st.integers(0, 3))


@given(ROUTES, RULES, ANY_FACTS, st.data())
def test_dispatch_never_loops_and_never_changes_the_task(
    routes: list[tuple[Task, tuple[StandIn, ...]]],
    rules: tuple[Rule, ...],
    asked: Facts,
    data: st.DataObject,
) -> None:
    models = [model(f"m{at}", task, fallback=fallback) for at, (task, fallback) in enumerate(routes)]
    known = make_table(Dispatch({}, rules), models)
    chosen = resolve(known, asked)
    if chosen is None:
        return
    assert chosen.model == asked.name or known.models[chosen.model].task in (asked.task, *asked.also)
    meant = known.models[chosen.model].task
    seen = [chosen.model]
    while chosen is not None:
        states = data.draw(st.fixed_dictionaries({m.name: st.sampled_from(list(Condition)) for m in models}))
        chosen = fall_back(known, chosen, states)
        if chosen is not None:
            assert states[chosen.model] is FREE
            assert known.models[chosen.model].task is meant
            seen.append(chosen.model)
    assert len(set(seen)) == len(seen)

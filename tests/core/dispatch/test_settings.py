"""Names, rules and fallbacks in the cluster file, and their conflicts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.cluster import Cluster, conflicts
from forebay.core.dispatch.settings import CIRCLE_NAMES_MAX, make_dispatch, stand_ins
from forebay.core.model import Condition, Dispatch, Rule, StandIn, Task, When
from forebay.wire.clusterfile import ClusterFileError, load

MODELS = """
models:
  - {name: big, task: chat, source: a, fallback: [small, {model: tiny, when: down}], price_per_mtok: 3}
  - {name: small, task: chat, source: a, fallback: [{model: tiny, when: saturated}], fallback_default: deny}
  - {name: tiny, task: chat, source: a}
  - {name: embed, task: embed, source: a}
"""


def problems(text: str, models: str = MODELS) -> dict[str, str]:
    """Path → what is allowed there."""
    with pytest.raises(ClusterFileError) as caught:
        load(models + text, "f.yaml")
    found = {p.path: p.allowed for p in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    return found


def test_a_rule_that_never_applies_is_a_problem() -> None:
    found = problems(
        """
aliases: {other: small}
routes:
  - {name: auto, when: {header: {name: x}}, then: big}
  - {name: auto, then: small}
  - {name: auto, then: embed}
  - {name: big, when: {}, then: other@r-1}
  - {name: big, when: {header: {name: x}}, then: tiny}
  - {name: auto, then: tiny}
  - {name: auto, then: embed}
"""
    )

    assert found == {
        "routes[4]": 'a place before routes[3], which matches every request for "big"',
        "routes[5]": 'a place before routes[1], which matches every request for "auto"',
        "routes[6]": 'a place before routes[2], which matches every request for "auto"',
    }


def test_names_and_rules_become_the_dispatch_table() -> None:
    cluster = load(
        MODELS
        + """
tenants: [{name: bob}]
gateway: {auth: keys}
aliases: {gpt-4.1: best, best: big, "meta-llama/Llama-3:8b": auto}
routes:
  - name: auto
    when:
      task: chat
      prompt_tokens_min: 10
      prompt_tokens_max: 20
      tenant: bob
      header: {name: x-tier, value: gold, prefix: g}
      budget_ms_below: 500
      budget_ms_above: 5
      within_max_cost: true
    then: best
  - {name: auto, when: {header: {name: x-tier}}, then: best@r-7}
  - {name: auto, then: small}
""",
        "f.yaml",
    )

    everything = When(Task.CHAT, 10, 20, "bob", "x-tier", "gold", "g", 500, 5, True)
    assert make_dispatch(cluster.aliases, cluster.routes) == Dispatch(
        {"gpt-4.1": "big", "best": "big", "meta-llama/Llama-3:8b": "auto"},
        (
            Rule("auto", "big", "", everything),
            Rule("auto", "big", "r-7", When(header="x-tier")),
            Rule("auto", "small"),
        ),
    )
    assert stand_ins(cluster.models[0].fallback) == (StandIn("small"), StandIn("tiny", (Condition.DOWN,)))
    assert stand_ins(cluster.models[1].fallback) == (StandIn("tiny", (Condition.SATURATED,)),)
    assert [m.fallback_default for m in cluster.models] == ["allow", "deny", "allow", "allow"]


def test_dangling_aliases_are_problems() -> None:
    found = problems(
        'aliases: {a: b, b: c, c: b, big: small, "x y": big, to: nothing, two: 2, fine: auto}\n'
        "routes: [{name: auto, then: big}]"
    )

    assert found == {
        "aliases.b": "an alias that leads to a model",
        "aliases.big": "a name that no model has",
        "aliases.x y": "up to 128 letters, digits, `.`, `_`, `:`, `/`, `-`, with a letter or digit at both ends",
        "aliases.to": "a model, another alias or a name in `routes`: big, embed, small, tiny",
        "aliases.two": "text (not empty)",
    }


def test_long_alias_cycle_is_shown_in_part() -> None:
    names = [f"a{n}" for n in range(CIRCLE_NAMES_MAX + 1)]
    aliases = dict(zip(names, [*names[1:], names[0]], strict=True))
    [long] = conflicts({"aliases": aliases})
    [short] = conflicts({"aliases": {"a": "a"}})

    assert long.found.endswith(" → a7 → …")
    assert short.found == "a cycle: a → a"


def test_invalid_rules_are_problems() -> None:
    found = problems("""
aliases: {best: big, vectors: embed}
routes:
  - {name: best, then: big}
  - {name: auto, then: nothing}
  - {name: auto, then: auto}
  - {name: auto, when: {task: embed}, then: best}
  - {name: auto, when: {task: chat}, then: vectors@r-1}
  - {name: auto, when: {within_max_cost: true}, then: small}
  - {name: auto, when: {prompt_tokens_min: 9, prompt_tokens_max: 8, tenant: bob}, then: big}
  - {name: auto, when: {budget_ms_below: 5, budget_ms_above: 5}, then: big}
  - {name: open, when: {tenant: ""}, then: big}
  - {name: big, when: {prompt_tokens_max: 5}, then: small}
  - {name: auto, when: 5, then: "a b"}
  - {when: {header: {name: X-Upper}}, then: big}
""")

    models = "a model or an alias of one: big, embed, small, tiny"
    assert found == {
        "routes[0].name": "the name that the alias stands for",
        "routes[1].then": models,
        "routes[2].then": models,
        "routes[3].then": "a model with the task embed, as in `when`",
        "routes[4].then": "a model with the task chat, as in `when`",
        "routes[5].when.within_max_cost": "false, or a `price_per_mtok` for the model small",
        "routes[6].when.prompt_tokens_max": "at least 9, the `prompt_tokens_min`",
        "routes[6].when.tenant": "one of `tenants`: there is none",
        "routes[7].when.budget_ms_below": "more than 5, the `budget_ms_above`",
        "routes[8].when": 'no `when`: no model is named "open", so its last rule must match every request',
        "routes[8].when.tenant": "text (not empty)",
        "routes[10].when": found["routes[10].when"],
        "routes[10].then": "the name of a model or an alias, or NAME@REVISION",
        "routes[11].name": "up to 128 letters, digits, `.`, `_`, `:`, `/`, `-`, with a letter or digit at both ends",
        "routes[11].when.header.name": "up to 64 of a-z, 0-9, `-`, with a letter or digit at both ends",
    }


def test_invalid_fallbacks_are_problems() -> None:
    fallback = "[chat, vectors, none, other, {model: other}, {model: 5}, 7, {model: odd, when: never}]"
    found = problems(
        "",
        f"""
models:
  - {{name: chat, task: chat, source: a, fallback: {fallback}}}
  - {{name: other, task: chat, source: a}}
  - {{name: vectors, task: embed, source: a}}
  - {{name: odd, task: 5, source: a, fallback: [vectors]}}
""",
    )

    models = "a model: chat, odd, other, vectors"
    assert {path: text for path, text in found.items() if ".fallback" in path} == {
        "models[0].fallback[0]": "every other model at most once",
        "models[0].fallback[1]": "one with the task chat",
        "models[0].fallback[2]": models,
        "models[0].fallback[4].model": "every other model at most once",
        "models[0].fallback[5].model": found["models[0].fallback[5].model"],
        "models[0].fallback[6]": "a section with the keys model, when",
        "models[0].fallback[7].when": 'one of "saturated", "down", "either"',
    }


def test_clusters_built_in_code_are_validated_alike() -> None:
    document = {
        "models": [{"name": "a", "task": "chat", "source": "x", "fallback": ["b"]}],
        "routes": [{"name": "auto", "then": "a"}],
    }
    with pytest.raises(ValueError, match=r"models\[0\]\.fallback\[0\]\.model"):
        Cluster.model_validate(document)
    document["models"][0]["fallback"] = []  # type: ignore[index]
    assert Cluster.model_validate(document).routes[0].then == "a"


KEYS = st.sampled_from(["name", "task", "when", "then", "model", "fallback", "tenant", "prompt_tokens_min", "a", "b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["models", "aliases", "routes", "tenants"]), VALUES | st.lists(VALUES)))
def test_conflict_check_handles_any_data(data: dict[str, object]) -> None:
    assert all(each.path and each.found and each.allowed for each in conflicts(data))

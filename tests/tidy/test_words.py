"""Words, calls and handlers that must not be in the tree. Banned words are put together here, so that this passes."""

import ast
import re
from pathlib import Path

from tests.tidy.checkout import list_of, name, python_files, statements, text_files, tree

LEFTOVERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")
PLACES = re.compile(
    "|".join(
        (
            r"(?<![\w.$}])/(wo" + r"rk|ro" + r"ot|fa" + r"rm)/",
            r"/opt/(py" + r"pi|wheels)",
            "py" + r"pi\.org",
            "python" + "hosted",
            "npm" + r"js\.",
            r"deb\.deb" + "ian",
            r"\.\./sha" + "red",
        )
    )
)
PLANS = re.compile(r"\b([Ii]ssue|PR|[Pp]hase|[Ss]tep) #?\d+\b")

BROAD_HANDLERS = {
    "src/forebay/cli/reload.py": "a cluster file over which we stumble must not end what runs",
    "src/forebay/control/api/app.py": "a mistake about one request must not end what looks after the cluster",
    "src/forebay/control/health/polling.py": "a driver's library may raise anything, which is no news of devices",
    "src/forebay/control/health/health.py": "a mistake about one device must not end control",
    "src/forebay/control/loop.py": "a mistake in one round must not end the loop that keeps everything alive",
    "src/forebay/control/quality/quality.py": "a mistake in judging answers must not end control",
    "src/forebay/control/deploying.py": "a mistake about one rollout must not end control",
    "src/forebay/control/scaling/storing.py": "a mistake in writing down what is learned must not end control",
    "src/forebay/engines/tensor/python/backend.py": "a model may raise anything, and its batch gets an answer",
    "src/forebay/modelserver/http/front.py": "a mistake in a load must not end the task group of the server",
    "src/forebay/modelserver/http/generating.py": "a mistake with one answer must not stop those who call back",
    "src/forebay/modelserver/http/inferring.py": "a mistake with one answer must not stop those who call back",
    "src/forebay/modelserver/models/life/version.py": "a mistake in keeping one model must not cost the others",
    "src/forebay/modelserver/models/running/call.py": "who cannot take an answer must not cost others theirs",
    "src/forebay/modelserver/models/running/bls.py": "a mistake in one model's call must not end the server",
    "src/forebay/modelserver/process/child/instance.py": "what a model raises fails its batch, not the process",
    "src/forebay/modelserver/process/child/running.py": "the server hears why a child ends, whatever the reason",
    "src/forebay/modelserver/rpc/calls.py": "a mistake in one call must not end the connection of many",
    "src/forebay/modelserver/rpc/inferring.py": "a mistake with one answer must not stop those who call back",
    "src/forebay/modelserver/rpc/streaming.py": "a mistake with one answer must not stop those who call back",
    "src/forebay/modelserver/server.py": "a mistake about one change of the repository must not end what is served",
    "src/forebay/modelserver/tasks/endpoint.py": "a mistake with one answer must not stop those who call back",
    "src/forebay/modelserver/telemetry/gpus.py": "a driver's library may raise anything, and only metrics need it",
    "src/forebay/net/client/call.py": "a mistake in who waits for one answer must not end the others",
    "src/forebay/net/client/upstream.py": "a mistake in who waits for one answer must not end that of others",
    "src/forebay/net/connection.py": "a mistake in a handler costs one answer, not the connection",
    "src/forebay/net/http2.py": "a mistake about one connection must not end the timeouts of all others",
    "src/forebay/net/outbox.py": "a mistake with one connection must not keep back what others send",
    "src/forebay/net/server.py": "a mistake about one connection must not end the timeouts of all others",
    "src/forebay/sim/full/chaos.py": "whatever a simulated cluster dies of is what it was looked for",
    "src/forebay/sim/loop.py": "whatever a callback raises is collected and ends the run",
    "src/forebay/worker/child.py": "after an exception inside an engine nothing about it is known any more",
    "src/forebay/worker/engine_process.py": "a mistake in building one answer must not cost the engine",
    "src/forebay/worker/shell.py": "every request gets an answer, even one that meets our own mistake",
}
"""File → why it may catch everything: only supervisors may, whose job is to outlive what they watch."""

WAITERS = re.compile(r"wait|poll|until|eventually|settle")
"""Test helpers with such a name may pause between two looks at a condition."""


def found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{name(path)}:{number}: {match[0]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]


def test_nothing_is_left_for_later() -> None:
    left = found(LEFTOVERS, text_files())

    assert not left, f"do it, or file an issue and delete the word:{list_of(left)}"


def test_no_file_names_a_place_that_only_one_machine_has_or_an_index_host() -> None:
    places = found(PLACES, text_files())

    assert not places, (
        f"use a relative path or a setting; name packages, never where they come from:{list_of(places)}"
    )


def test_code_does_not_cite_plans() -> None:
    cited = found(PLANS, python_files("src", "tests", "bench"))

    assert not cited, f"say the reason itself, a reader cannot look the plan up:{list_of(cited)}"


def is_broad(handler: ast.ExceptHandler) -> bool:
    """True if it catches everything and goes on; cleaning up or translating, and raising again, is no matter."""
    if isinstance(handler.body[-1], ast.Raise):
        return False
    caught = handler.type
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds)


def test_only_supervisors_catch_everything() -> None:
    broad = {
        f"{name(path)}:{node.lineno}": name(path)
        for path in python_files("src")
        for node in statements(path)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    }
    strangers = [place for place, file in broad.items() if file not in BROAD_HANDLERS]
    stale = sorted(set(BROAD_HANDLERS) - set(broad.values()))

    assert not strangers, f"catch what can really happen; a supervisor goes to BROAD_HANDLERS:{list_of(strangers)}"
    assert not stale, f"these no longer catch everything, delete them from BROAD_HANDLERS:{list_of(stale)}"


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
        case _:
            return []


def test_tests_use_fakes_with_behaviour_instead_of_mocks() -> None:
    mocks = [
        f"{name(path)}:{getattr(node, 'lineno', 0)}"
        for path in python_files("tests")
        for node in statements(path)
        if any(module.startswith(("unittest" + ".mock", "mock")) for module in imported(node))
    ]

    assert not mocks, f"write a small fake, or use the synthetic engine or the memory provider:{list_of(mocks)}"


def sleeps(tree_of_file: ast.Module) -> list[int]:
    """Lines that sleep, except between two looks at a condition; `asyncio.sleep(0)` only yields."""
    lines = []

    def visit(node: ast.AST, waiting: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting = waiting or bool(WAITERS.search(node.name))
        waiting = waiting or isinstance(node, ast.While)
        if isinstance(node, ast.Call) and not waiting:
            called = ast.unparse(node.func)
            yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if called == "time.sleep" or (called in ("asyncio.sleep", "sleep") and not yields):
                lines.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, waiting)

    visit(tree_of_file, False)
    return lines


def test_no_test_sleeps() -> None:
    sleepy = [f"{name(path)}:{line}" for path in python_files("tests") for line in sleeps(tree(path))]

    assert not sleepy, f"wait for the condition with a bounded poll (`wait_for`):{list_of(sleepy)}"

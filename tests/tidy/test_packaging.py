"""What makes the product installable from a clean checkout."""

import os
import re
import tomllib
from pathlib import Path

from tests.tidy.checkout import ROOT, list_of

LOCKS = ("requirements.lock", "requirements-dev.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(lock: str) -> dict[str, str]:
    """Package → version."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE))


def required(*groups: str) -> set[str]:
    lines = [*PROJECT["dependencies"], *(line for g in groups for line in PROJECT["optional-dependencies"][g])]
    return {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in lines}


def test_locks_name_no_index_no_host_and_no_path() -> None:
    lines = [
        f"{lock}:{number}: {line}"
        for lock in LOCKS
        for number, line in enumerate((ROOT / lock).read_text().splitlines(), 1)
        if re.search(r"://|^-| @ |\.\.?/", line)
    ]

    assert not lines, f"run `make lock`; nobody else can install from these:{list_of(lines)}"


def test_every_locked_package_has_a_hash() -> None:
    for lock in LOCKS:
        entries = re.split(r"\n(?=[a-z0-9][a-z0-9._-]*==)", (ROOT / lock).read_text())[1:]
        assert len(entries) == len(pins(lock))
        assert [e.split()[0] for e in entries if "--hash=sha256:" not in e] == [], f"{lock}: run `make lock`"


def test_locks_hold_what_the_project_asks_for() -> None:
    runtime, dev = pins(LOCKS[0]), pins(LOCKS[1])

    assert required("llm", "onnx", "plot") - set(runtime) == set(), "run `make lock`"
    assert required("llm", "onnx", "plot", "llamacpp", "dev") - set(dev) == set(), "run `make lock`"
    assert "setuptools" in runtime, "the build needs setuptools: run `make lock`"


def test_both_locks_agree() -> None:
    runtime, dev = pins(LOCKS[0]), pins(LOCKS[1])

    assert {p: (v, dev.get(p)) for p, v in runtime.items() if dev.get(p) != v} == {}, "run `make lock`"


def test_nothing_pulls_torch_in() -> None:
    heavy = {"torch", "transformers", "triton", "tensorflow"}

    assert heavy & (set(pins(LOCKS[0])) | set(pins(LOCKS[1]))) == set()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text().strip().splitlines()

    assert script[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script
    assert script[-1] == "make test"
    assert re.search(r"```bash\nmake test\n```", (ROOT / "README.md").read_text()), "the README must say `make test`"


def test_scripts_can_be_executed() -> None:
    for script in (".ci/run", "scripts/venv", "scripts/lock"):
        assert os.access(ROOT / script, os.X_OK), f"chmod +x {script}"


def test_the_version_is_written_once_in_each_place_it_must_be() -> None:
    import forebay

    assert forebay.__version__ == PROJECT["version"], "src/forebay/__init__.py and pyproject.toml differ"
    changes = Path(ROOT / "CHANGELOG.md").read_text()
    assert f"## [{PROJECT['version']}]" in changes, "the version has no section in CHANGELOG.md"

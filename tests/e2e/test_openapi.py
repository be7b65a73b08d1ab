"""The published OpenAPI documents against a real cluster: requests generated from them are answered as documented."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.e2e.cluster import Cluster, running

from forebay.wire.openapi.tasks import TASKS

pytestmark = pytest.mark.timeout(300)
MODELS = [
    {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic"},
    {"name": "embed", "task": "embed", "source": "synthetic", "engine": "synthetic"},
]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
EXAMPLES_MAX = 10
SEED = 1
"""Of the generator: a failure here is a failure elsewhere."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of models that answer at once. Its home is its own: what the requests set is kept there."""
    folder = Path(tmp_path_factory.mktemp("openapi"))
    with running(folder, "e2e-openapi", MODELS, folder / "home") as cluster:
        yield cluster


def fetched(url: str) -> dict[str, Any]:
    """The document that a listener serves."""
    answer = httpx.get(f"{url}/openapi.json", timeout=5)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    document: dict[str, Any] = answer.json()
    assert document["openapi"].startswith("3.1.")
    return document


def worked(folder: Path, document: dict[str, Any], url: str, *checks: str) -> None:
    """Make requests from the document, damaged ones too, and check all answers."""
    path = folder / "openapi.json"
    path.write_bytes(msgspec.json.encode(document))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", url, "--checks", ",".join(checks),
        "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES_MAX), "--seed", str(SEED), "--no-shrink",
        "--workers", "1", "--warnings", "off", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_gateway_conforms_to_its_openapi_document(cluster: Cluster, tmp_path: Path) -> None:
    document = fetched(cluster.url)
    schemas = document["components"]["schemas"]
    # no tensor model is served here: tests of the model server hold their answers against the document
    others = {path for path in document["paths"] if path in TASKS or path.startswith("/v2")}
    document["paths"] = {path: each for path, each in document["paths"].items() if path not in others}
    for path, methods in document["paths"].items():
        if "post" in methods:  # names that nobody serves would all be answered with 404
            name = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            schemas[name]["properties"]["model"] = {"enum": ["embed" if "embed" in path else "chat"]}
            for each in methods["post"]["parameters"]:
                if each["name"] == "x-forebay-deadline-ms":  # too little time is answered with 504, rightly
                    each["schema"]["pattern"] = "^[1-9][0-9]{5,8}$"
    worked(tmp_path, document, cluster.url, *CHECKS)


def test_admin_api_conforms_to_its_openapi_document(cluster: Cluster, tmp_path: Path) -> None:
    document = fetched(cluster.admin)
    # not every text is a cluster file or a plan, nor is every list of paths one of files
    schemas = document["components"]["schemas"]
    upload = schemas["Add"]["anyOf"][0]["properties"]["upload"]["properties"]
    upload["name"] = {"enum": ["model"]}
    for manifest in (upload, schemas["Manifest"]["properties"]):
        manifest["files"]["maxItems"] = 1
        manifest["files"]["items"]["properties"] |= {"path": {"enum": ["model.bin"]}, "size_bytes": {"enum": [0, 7]}}
    schemas["AuditTailAsked"]["properties"]["last"] = {
        "enum": [1, 1000]
    }  # 44.0 is none here, but an integer of JSON Schema
    for number in ("replicas", "min", "max"):  # each replica is two processes; 0.0 is none, as above
        schemas["Scaling"]["properties"][number] = {"enum": [None, 0, 1, 3]}
    applied = schemas["Apply"]["properties"]
    applied |= {"document": {"enum": [cluster.file.read_text()]}, "dry_run": {"enum": [True]}}
    for parameter in document["paths"]["/v1/models/{model}/deploy"]["post"]["parameters"]:
        parameter["schema"] = {"enum": ["nobodys"]}
    more = ("unsupported_method", "allow_header_conformance", "positive_data_acceptance")
    worked(tmp_path, document, cluster.admin, *CHECKS, *more)

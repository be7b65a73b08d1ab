"""How deployments find registered revisions: by id or alias, if deployable, with verified files."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.registry.artifacts import prepare_model
from forebay.cli.registry.opening import registry_of
from forebay.cli.registry.shelf import CatalogueShelf, in_thread, rollouts_of
from forebay.control.deploying import DeployRefused
from forebay.core.cluster import Cluster
from forebay.core.model import Task
from forebay.core.registry.approval import Step
from forebay.registry.catalogue import Actor, Description, Registry
from forebay.store.database import StoreError
from forebay.store.rollouts import RolloutEvent, Target


def cluster_of(folder: Path, source: str = "synthetic", **settings: Any) -> Cluster:
    model = {"name": "chat", "task": "chat", "source": source, "engine": "synthetic"}
    if source.startswith("registry:"):
        del model["engine"]
    return Cluster.model_validate({"models": [model], "registry": {"approvals_min": 1}, **settings})


def shelf_of(cluster: Cluster, home: Path) -> CatalogueShelf:
    return CatalogueShelf(lambda: cluster, home, prepare_model, lambda *_: None)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with registry_of(cluster_of(tmp_path), tmp_path) as opened:
        yield opened()


def added(registry: Registry, folder: Path, model: str = "chat", task: Task = Task.CHAT) -> str:
    path = folder / "model.bin"
    path.write_bytes(b"weights")
    what = Description(model, "model.bin", task, "synthetic", {"dimensions": 65})
    return registry.add(what, path, Actor("ann"), lambda *_: None).revision.id


def test_deployable_revision_is_found_and_its_files_are_fetched(tmp_path: Path, registry: Registry) -> None:
    cluster = cluster_of(tmp_path)
    shelf, id = shelf_of(cluster, tmp_path), added(registry, tmp_path)
    with pytest.raises(DeployRefused, match=f"chat@{id}: is pending") as caught:
        shelf.find("chat", id)
    assert caught.value.param == "revision"
    with pytest.raises(DeployRefused, match="is pending"):
        asyncio.run(shelf.prepare("chat", id))
    registry.step("chat", id, Step.APPROVE, Actor("bob"))
    registry.set_alias("chat", "champion", id, Actor("bob"))
    assert shelf.find("chat", id) == shelf.find("chat", "champion") == id
    artifact = asyncio.run(shelf.prepare("chat", id))
    assert (artifact.path.read_bytes(), artifact.engine) == (b"weights", "synthetic")
    assert artifact.settings["dimensions"] == 65
    with pytest.raises(
        DeployRefused, match=rf"no such revision; there is: {id} \(champion\)\. `forebay registry add"
    ):
        shelf.find("chat", "r-unheard")
    with pytest.raises(DeployRefused, match="no longer in the cluster file"):
        shelf.find("nobody", id)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("synthetic", "chat SOURCE --task chat --engine synthetic"),
        ("registry:smol@r-1", "smol SOURCE --task chat"),
    ],
)
def test_an_unregistered_revision_is_an_error_with_the_command_that_registers_one(
    tmp_path: Path, source: str, words: str
) -> None:
    with pytest.raises(DeployRefused) as caught:
        shelf_of(cluster_of(tmp_path, source), tmp_path).find("chat", "new")
    model = words.split(maxsplit=1)[0]
    assert caught.value.text == (
        f"{model}@new: there is no such revision; no revision of {model} is registered. "
        f"`forebay registry add {words}` registers one"
    )


def test_modified_files_are_not_fetched(tmp_path: Path, registry: Registry) -> None:
    id = added(registry, tmp_path)
    registry.step("chat", id, Step.APPROVE, Actor("bob"))
    files = (path for path in sorted((tmp_path / "registry").rglob("*")) if path.is_file())
    blob = next(path for path in files if path.read_bytes() == b"weights")
    blob.chmod(0o600)
    blob.write_bytes(b"Weights")
    with pytest.raises(DeployRefused, match=r"model\.bin: its SHA-256 is"):
        asyncio.run(shelf_of(cluster_of(tmp_path), tmp_path).prepare("chat", id))


def test_revision_of_another_task_is_rejected(tmp_path: Path, registry: Registry) -> None:
    id = added(registry, tmp_path, task=Task.EMBED)
    registry.step("chat", id, Step.APPROVE, Actor("bob"))
    with pytest.raises(DeployRefused, match="is registered for `task: embed`, and chat has chat"):
        shelf_of(cluster_of(tmp_path), tmp_path).find("chat", id)


def test_revisions_are_looked_up_by_the_name_in_the_source(tmp_path: Path, registry: Registry) -> None:
    id = added(registry, tmp_path, "smol")
    registry.step("smol", id, Step.APPROVE, Actor("bob"))
    cluster = cluster_of(tmp_path, f"registry:smol@{id}")
    assert shelf_of(cluster, tmp_path).find("chat", id) == id
    assert asyncio.run(shelf_of(cluster, tmp_path).prepare("chat", id)).engine == "synthetic"


def test_store_outage_is_a_store_error_not_a_rejection(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, store="postgresql://forebay@127.0.0.1:1/forebay")
    shelf = shelf_of(cluster, tmp_path)
    with pytest.raises(StoreError):
        shelf.find("chat", "r-1")
    with pytest.raises(StoreError):
        asyncio.run(shelf.prepare("chat", "r-1"))


@pytest.mark.parametrize("store", [None, "sqlite:///{}/own.db"])
def test_missing_store_has_no_rollouts_and_is_not_created(tmp_path: Path, store: str | None) -> None:
    cluster = cluster_of(tmp_path, store=store.format(tmp_path) if store else None)
    rollouts = rollouts_of(cluster, tmp_path)
    assert asyncio.run(in_thread(rollouts.known)).targets == ()
    assert not list(tmp_path.iterdir())
    rollouts.close()


def test_rollouts_of_a_store_with_options_in_its_url_are_found_again(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, store=f"sqlite:///{tmp_path}/own.db?timeout=9")
    target = Target("chat", "r-new", "r-old", (0,), 6.0, "ann")
    writing, reading = rollouts_of(cluster, tmp_path), rollouts_of(cluster, tmp_path)
    asyncio.run(in_thread(lambda: writing.point(target, RolloutEvent("target.set", 6.0, "ann"))))

    assert asyncio.run(in_thread(reading.known)).targets == (target,)
    writing.close()
    reading.close()

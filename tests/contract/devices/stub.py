"""The compiled stub of NVIDIA's library, controlled by a file."""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import gettempdir

SOURCE = Path(__file__).with_name("nvml_stub.c")
NAME = "libnvidia-ml.so.1"


@cache
def compiler() -> str | None:
    """Path of a C compiler; None: there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, *flags: str) -> Path:
    """The library in a folder, under the name by which the loader looks for it."""
    library = folder / NAME
    draft = folder / f"{NAME}.{os.getpid()}"
    command = [
        str(compiler()),
        "-shared",
        "-fPIC",
        "-O0",
        f"-Wl,-soname,{NAME}",
        *flags,
        "-o",
        str(draft),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    draft.rename(library)
    return library


@cache
def loaded() -> None:
    """Have it in this process: who opens a library of that name from now on gets it."""
    folder = Path(gettempdir()) / f"forebay-nvml-{os.getuid()}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        ctypes.CDLL(str(build(folder)), mode=ctypes.RTLD_GLOBAL)
    finally:
        shutil.rmtree(folder)

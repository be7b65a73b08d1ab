"""The stub of NVIDIA's driver library, compiled."""

import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("cuda_stub.c")
NAME = "libcuda.so.1"


def build(folder: Path) -> Path:
    """The library in a folder, under the name by which it is looked for once it is loaded."""
    library = folder / NAME
    flags = ("-shared", "-fPIC", f"-Wl,-soname,{NAME}")
    subprocess.run([str(COMPILER), *flags, "-o", str(library), str(SOURCE)], check=True)
    return library

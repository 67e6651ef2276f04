"""Stand-ins that are compiled, as Python can't do what they do: load as a library, or run without the GIL."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path | None:
    """Return the library, made in a folder from C; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    code, library = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(code)], check=True)
    return library

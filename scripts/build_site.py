"""Build the site from Markdown that reads on its own: gather the pages, write the reference, run Sphinx.

The sources do not mention the site. What a page needs to be part of it, its place in the list and links that lead to
pages instead of files, is made here, in a copy.
"""

from __future__ import annotations

import argparse
import ast
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
EXECUTED = ROOT / "build" / "notebooks"

NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
CHAPTERS = {
    "Guides": (
        "training",
        "nodes",
        "scale",
        "launcher",
        "interrupts",
        "heal",
        "elastic",
        "saving",
        "allocations",
        "debug",
        "attach",
        "measures",
        "guests",
        "scripts",
        "jobs",
        "agents",
        "jupyterlab",
        "front_ends",
        "cuda_guard",
        "reliability",
        "troubleshooting",
    ),
    "Notebooks": tuple(str(path.relative_to(ROOT).with_suffix("")) for path in NOTEBOOKS),
    "Reference": ("reference", "api"),
    "Coming from": (
        "from_accelerate",
        "from_torchrun",
        "from_nbdistributed",
        "from_jupyter_distributed",
        "from_ipyparallel",
    ),
    "About": ("performance", "gpu", "compatibility", "architecture", "contributing", "changelog"),
    "Decisions": (
        "decisions",
        *(f"decisions/{path.stem}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))),
    ),
}
TOP = {"README.md": "index", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}

CONFIGURATION = """
project = "nbdist"
html_title = "nbdist"
html_theme = "furo"
html_theme_options = {"sidebar_hide_name": False}
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Types stand in signatures as they are written; not each is a page. Languages of ours are drawn as plain text.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
linkcheck_timeout = 20


def setup(app):
    from sphinx.highlighting import lexers
    from pygments.lexers import TextLexer
    from IPython.lib.lexers import IPython3Lexer

    lexers["output"] = TextLexer()
    lexers["python"] = lexers["ipython3"] = IPython3Lexer()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", action="store_true", help="check links to other sites")
    arguments = parser.parse_args()

    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "notebooks").mkdir(parents=True)
    gather_pages()
    (SOURCE / "api.rst").write_text(reference(), encoding="utf-8")
    (SOURCE / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
    done = sphinx("html", SITE)
    if done == 0 and arguments.links:
        done = sphinx("linkcheck", ROOT / "build" / "site-links")
    if done == 0:
        print(f"the site: {os.path.relpath(SITE)}/index.html")
    return done


def sphinx(builder: str, output: Path) -> int:
    command = ["-m", "sphinx", "-q", "-b", builder, "--fail-on-warning", "--keep-going", str(SOURCE), str(output)]
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


# --- pages


def gather_pages() -> None:
    for name, page in TOP.items():
        text = with_links((ROOT / name).read_text(encoding="utf-8"), name)
        (SOURCE / f"{page}.md").write_text(text + (contents() if page == "index" else ""), encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.*"):
        copy = SOURCE / path.relative_to(ROOT / "docs")
        copy.parent.mkdir(exist_ok=True)
        if path.suffix == ".md":
            text = with_links(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
            copy.write_text(text, encoding="utf-8")
        else:
            shutil.copy(path, copy)
    for path in NOTEBOOKS:
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(EXECUTED / path.name, copy)
    shutil.copy(ROOT / "LICENSE", SOURCE)


def with_links(text: str, name: str) -> str:
    """A page whose links lead to pages of the site, given the name of its file, relative to the repository."""

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[1].partition("#")
        to = place(posixpath.normpath(posixpath.join(posixpath.dirname(name), target)))
        return f"]({posixpath.relpath(to, posixpath.dirname(place(name)) or '.')}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", link, text)


def place(name: str) -> str:
    """Where a file of the repository is in the site's sources."""
    return f"{TOP[name]}.md" if name in TOP else name.removeprefix("docs/")


def contents() -> str:
    """The list of all pages, which the theme shows at the side."""
    docs = ROOT / "docs"
    missing = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    missing -= {page for pages in CHAPTERS.values() for page in pages}
    if missing:
        raise SystemExit(f"{__file__}: these pages are in no chapter: {', '.join(sorted(missing))}")
    return "".join(
        f"\n:::{{toctree}}\n:hidden:\n:caption: {chapter}\n\n" + "".join(f"{page}\n" for page in pages) + ":::\n"
        for chapter, pages in CHAPTERS.items()
    )


# --- the reference


def reference() -> str:
    """All public names with their docstrings, by the module that they come from."""
    import nbdist

    stub = ast.parse(Path(nbdist.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = sorted(alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    kinds: dict[str, list[str]] = {"Classes": [], "Functions": [], "Errors": []}
    for name in names:
        value = getattr(nbdist, name)
        if isinstance(value, type):
            kinds["Errors" if issubclass(value, nbdist.NbdistError) else "Classes"].append(name)
        elif getattr(value, "__doc__", None) and callable(value) and name != "load_ipython_extension":
            kinds["Functions"].append(name)
    directives = {"Classes": "autoclass", "Functions": "autofunction", "Errors": "autoexception"}
    lines = [*titled("Reference from docstrings", "="), "What each name is for, in a line: :doc:`reference`.", ""]
    for kind, found in kinds.items():
        lines += titled(kind, "-")
        for name in found:
            lines += [f".. {directives[kind]}:: nbdist.{name}"]
            lines += ["   :members:", ""] if kind == "Classes" else [""]
    return "\n".join(lines)


def titled(title: str, line: str) -> list[str]:
    return [title, line * len(title), ""]


if __name__ == "__main__":
    sys.exit(main())

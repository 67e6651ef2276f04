"""Docstrings and comments name files and modules that exist: a pointer to what has moved leads a reader nowhere."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "labextension", "nbdist", "notebooks", "scripts", "testbed", "tests")

FILE = re.compile(r"(?<![\w/.<-])((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|ts|mjs|md|toml|ipynb))(?![\w/])")
FOLDER = re.compile(r"`((?:[a-z_]+/)+[a-z_]*)`")
DOTTED = re.compile(r"(?<![\w/.-])nbdist((?:\.[A-Za-z_]\w*)+)")
NAME = re.compile(r"`([a-z_][a-z_0-9]*)`")

# Files that are examples of a user's, and folders of other projects.
OF_USERS = {"random.py", "torch.py", "train.ipynb", "train.py"}
OTHERS = {"adapter", "bitsandbytes", "flash_attn", "mamba_ssm", "peft", "torch", "transformer_engine", "xformers"}
# Names that begin with the package's and are none of it: a group of entry points, a file of settings.
NO_MODULES = {"clusters", "json"}
OF_OTHERS = {"report_sockets"}  # names that another project's code has


def inside(*folders: str, suffix: str) -> list[Path]:
    """The files of these folders, without those that tools have put there."""
    found = [path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}") if path.is_file()]
    return sorted(path for path in found if not {"node_modules", "__pycache__", "build"} & set(path.parts))


@functools.cache
def repository() -> set[str]:
    paths = [*inside(*FOLDERS, suffix=""), *(path for path in ROOT.iterdir() if path.is_file())]
    return {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}


def sources() -> list[Path]:
    """The files whose docstrings and comments are read."""
    scripts = [path for path in inside("scripts", suffix="") if not path.suffix]
    return [
        *inside("benchmarks", "nbdist", "scripts", "testbed", "tests", suffix=".py"),
        *inside("labextension/src", "labextension/test", suffix=".ts"),
        *inside("labextension", suffix=".mjs"),
        *scripts,
    ]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from ((first, words) for first, _, words in docstrings(path))
        yield from comments(text)
        return
    comment = r"/\*.*?\*/|//[^\n]*" if path.suffix else r"(?m)^\s*#[^\n]*"
    for match in re.finditer(comment, text, re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments of Python code; none where nothing behind a `#` could be a pointer, as finding them takes long."""
    tails = [line.partition("#")[2] for line in source.splitlines()]
    if not any(pattern.search(tail) for tail in filter(None, tails) for pattern in (FILE, FOLDER, DOTTED)):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@functools.cache
def docstrings(path: Path) -> list[tuple[int, int, str]]:
    """First line, last line and text of the docstrings of a file, its own first."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                first = node.body[0]
                found.append((first.lineno, first.end_lineno or first.lineno, text))
    return found


def strays(text: str, folder: str) -> list[str]:
    """What a text in this folder of the repository names and is not there."""
    files = [name for name in FILE.findall(text) if not is_known(name, folder)]
    folders = [name for name in FOLDER.findall(text) if not is_folder(name)]
    return files + folders + [f"nbdist{name}" for name in DOTTED.findall(text) if not is_defined(name[1:])]


@functools.cache
def is_known(name: str, folder: str) -> bool:
    """Whether a file is of that name; one without a folder is in the same part of the repository."""
    if name in OF_USERS or name.partition("/")[0] in OTHERS:
        return True
    part = "" if "/" in name or not name.endswith(".py") else f"/{folder}/"
    return any(path.startswith(part) and path.endswith(f"/{name}") for path in repository())


@functools.cache
def is_folder(name: str) -> bool:
    """Whether a folder, or a file without a suffix, is of that name."""
    return any(f"/{name.rstrip('/')}/" in f"{path}/" for path in repository())


@functools.cache
def is_defined(dotted: str) -> bool:
    """Whether what follows `nbdist.` is a module or what is in one. What is in a class there is not looked at."""
    names = dotted.split(".")
    if names[0] in NO_MODULES:
        return True
    count = max(n for n in range(len(names) + 1) if module_of(names[:n]) is not None)
    if count == len(names):
        return True
    places = [module_of(names[:count]), ROOT / "nbdist" / "__init__.pyi" if count == 0 else None]
    bodies = [ast.parse(place.read_text(encoding="utf-8")).body for place in places if place is not None]
    return any(names[count] in defined_by(statement) for body in bodies for statement in body)


def module_of(names: list[str]) -> Path | None:
    place = ROOT.joinpath("nbdist", *names)
    candidates = [place / "__init__.py", place.with_suffix(".py")] if names else [place / "__init__.py"]
    return next((path for path in candidates if path.is_file()), None)


def defined_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_what_docstrings_and_comments_name_exists() -> None:
    wrong = []
    for path in sources():
        place = path.relative_to(ROOT)
        for line, text in prose(path):
            wrong += [f"{place}:{line} {name}" for name in strays(text, place.parts[0])]
    assert not wrong, f"{len(wrong)} are not there (moved, or renamed?):\n" + "\n".join(wrong)


def test_what_the_documentation_has_nbdist_do_can_be_done() -> None:
    pages = [*ROOT.glob("*.md"), *inside("docs", suffix=".md"), *inside("notebooks", suffix=".ipynb")]
    named = {(page.name, name) for page in pages for name in DOTTED.findall(page.read_text(encoding="utf-8"))}
    assert sorted((page, name) for page, name in named if not is_defined(name[1:])) == []


def test_a_module_s_docstring_names_only_what_the_code_has() -> None:
    known = OF_OTHERS | words_of_code()
    wrong = []
    for path in inside("nbdist", suffix=".py"):
        for _, _, text in docstrings(path)[:1]:
            wrong += [f"{path.relative_to(ROOT)} `{name}`" for name in NAME.findall(text) if name not in known]
    assert not wrong, f"{len(wrong)} are not there (moved, or renamed?):\n" + "\n".join(wrong)


def words_of_code() -> set[str]:
    """The names of modules, and all words of nbdist's code outside of docstrings and comments."""
    found = {Path(path).stem for path in repository()}
    for path in inside("nbdist", suffix=".py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for first, last, _ in docstrings(path):
            lines[first - 1 : last] = [""] * (last - first + 1)
        found.update(word for line in lines for word in re.findall(r"\w+", line.partition("#")[0]))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "where an epoch stands in gone.py",
        "see `train/gone.py`",
        "see nbdist/train/gone.py:12",
        "rooms are in `train/gone/`",
        "what `nbdist.train.gone` says",
        "see `nbdist.plan.Gone`",
        "as gone.ts draws it",
    ],
)
def test_a_name_that_leads_nowhere_is_found(text: str) -> None:
    assert len(strays(text, "nbdist")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "the user's train.py:12",
        "see torch/cuda/memory.py:862",
        "loaders are made in loaders.py",
        "`train/data/loader.py` and `nbdist.train.data.loader`",
        "as `nbdist.prepare(model)` and `nbdist.Plan.environment`",
        "tests/unit/test_pointers.py",
    ],
)
def test_a_name_that_leads_somewhere_is_left_alone(text: str) -> None:
    assert strays(text, "nbdist") == []

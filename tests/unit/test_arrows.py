"""Which room of nbdist may import which, lazily and for types only included; and that each name is given once.

Also: which of the folders around nbdist may import which.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nbdist"

# A room is a folder of nbdist (`client.costs`) or a module at its top (`text`). What all rooms may import:
SHARED = {"_version", "base", "errors"}

# What else each may import. Lower lines import from higher ones only.
ALLOWED = {
    "_version": "",
    "errors": "",
    "base": "",
    "metrics.node": "",
    "devices": "metrics.node",
    "shells": "metrics.node",
    "cuda_guard": "devices metrics.node shells",
    "planning": "",
    "plan": "planning",
    "metrics.allocation": "metrics.node",
    "metrics.events": "",
    "metrics.rates": "metrics.node",
    "metrics.compute": "metrics.events metrics.rates",
    "metrics": "metrics.allocation metrics.compute metrics.events metrics.node metrics.rates shells",
    "metrics.advice": "metrics metrics.compute metrics.events metrics.node metrics.rates shells",
    # messages and values
    "wire.base": "",
    "wire.processes": "wire.base",
    "wire.messages": "metrics metrics.node wire.base wire.processes",
    "wire.questions": "metrics.node wire.base wire.messages",
    "wire.pages": "wire.messages",
    "wire": "wire.base wire.messages wire.processes wire.questions",
    "transfer": "metrics.node wire wire.base",
    "visits": "wire wire.base wire.messages",
    # training code
    "train": "metrics.node plan planning",
    "train.collective": "train",
    "train.experts": "train",
    "train.structure": "plan planning train.experts",
    "train.sequences": "train train.structure",
    "train.sharding": "train",
    "train.pipeline": "train.sharding train.structure",
    "train.loop": "metrics.allocation plan train train.collective train.pipeline train.sharding train.structure",
    "train.checkpoint": "train train.collective train.loop train.pipeline train.sharding train.structure",
    "train.compare": "train train.checkpoint train.collective train.loop train.sharding",
    "saving": "shells train train.checkpoint train.collective transfer wire.base wire.messages",
    "train.data": "plan train train.collective",
    "train.tracking": "train train.checkpoint train.collective",
    "train.prepare": "metrics.events plan planning train train.checkpoint train.collective train.data train.loop "
    "train.experts train.pipeline train.sequences train.sharding train.structure",
    "train.estimate": "metrics.compute metrics.node plan planning shells train train.loop train.prepare",
    # a rank, its node's agent, and the controller
    "worker.lanes": "wire wire.base wire.messages",
    "worker.processes": "",
    "worker.cell": "cuda_guard metrics.allocation metrics.node shells transfer wire.messages wire.questions "
    "worker.lanes",
    "worker.control": "metrics.node wire wire.base wire.messages wire.questions worker.cell worker.lanes",
    "worker.groups": "train.collective wire.base wire.messages wire.questions worker.cell",
    "worker.recovery": "metrics.events train train.sharding train.structure wire.base wire.messages wire.questions "
    "worker.cell worker.control worker.groups",
    "worker": "metrics metrics.compute metrics.events metrics.node shells train train.collective transfer wire "
    "wire.base wire.messages wire.questions worker.cell worker.control worker.groups worker.lanes worker.processes "
    "worker.recovery",
    # a rank is forked from it
    "agent.forks": "wire.messages wire.processes worker worker.cell",
    "agent": "agent.forks devices metrics.node wire wire.base wire.messages wire.processes wire.questions",
    "controller.base": "wire wire.base wire.messages wire.questions",
    "controller.nodes": "controller.base wire wire.base wire.messages wire.processes wire.questions",
    "controller.cells": "controller.base controller.nodes wire wire.base wire.messages wire.questions",
    "controller.ranks": "controller.base controller.cells controller.nodes wire wire.base wire.messages wire.questions",
    "controller.clients": "controller.base controller.ranks wire wire.base wire.messages wire.processes wire.questions",
    "controller": "controller.base controller.clients controller.nodes controller.ranks visits wire wire.base "
    "wire.messages wire.processes wire.questions",
    "cluster.engines": "wire.processes",
    "cluster": "cluster.engines devices wire wire.base wire.processes",
    # the notebook
    "client.output": "shells wire.messages",
    "client.base": "shells transfer wire.base wire.messages wire.questions",
    "client.reports": "client.base client.output wire.messages wire.questions",
    "client.start": "client.base cluster cluster.engines devices plan planning shells train wire wire.base "
    "wire.messages wire.processes",
    "client.ranks": "client.base client.output client.reports client.start metrics.node shells wire.base "
    "wire.messages wire.processes wire.questions",
    "client.requests": "client.base client.ranks client.reports metrics.allocation transfer wire.questions",
    "client.healing": "client.base client.ranks client.reports client.start train.compare wire.base wire.messages",
    "client.saving": "client.healing client.ranks client.start saving train.checkpoint wire.messages",
    "client.session": "client.base client.healing client.output client.ranks client.reports client.requests "
    "client.saving client.start devices plan shells visits wire.messages",
    "client.debugger": "client.base client.ranks shells wire.messages wire.questions",
    "client.costs": "client.ranks client.reports client.session metrics metrics.advice metrics.allocation "
    "metrics.node metrics.rates shells wire.messages wire.questions",
    "client": "client.costs client.ranks",
    "panel": "client.costs client.session metrics.allocation metrics.node shells visits wire.pages",
    "lab": "client.base client.output client.ranks client.reports client.requests client.session devices "
    "metrics.node panel shells wire.pages",
    # a process of somebody else's job, and a look into it
    "serving": "cluster metrics.node wire.questions worker.cell worker.control worker.groups",
    "serving.at_start": "cluster serving",
    "jobs": "agent client.output client.reports cluster serving wire.questions",
    # its commands
    "client.magic_lines": "client.costs client.reports client.saving client.start cluster.engines "
    "metrics.allocation plan planning",
    # for those who share a notebook's ranks
    "errands": "client.output client.ranks client.reports client.requests client.session shells wire.messages",
    "client.magics": "client.base client.costs client.debugger client.magic_lines client.output client.ranks "
    "client.reports client.requests client.session client.start cuda_guard errands jobs lab metrics.allocation "
    "metrics.node panel plan planning shells train.estimate wire.pages wire.questions",
    # a notebook without its kernel
    "export.source": "",
    "export": "client.costs client.magic_lines client.magics export.source plan planning",
    "launch": "client.base client.ranks client.start devices train transfer wire.messages wire.processes worker.cell",
    "launch.nodes": "client.output client.ranks client.reports launch shells transfer wire.messages",
    # it forks in the template's place
    "launch.fork": "agent.forks client.ranks cuda_guard launch transfer wire.messages wire.processes worker "
    "worker.processes",
    "launcher": "client.session client.start cuda_guard launch launch.fork launch.nodes shells transfer",
    # from beginning to end, without a notebook's page
    "program": "client.session export.source launcher metrics metrics.node",
    # in a Jupyter server
    "server": "metrics.node visits wire.pages",
    # an agent's server
    "mcp_server": "client.costs client.magics client.session client.start errands visits wire.messages",
    # the command line
    "command": "client.magics cluster export jobs mcp_server program serving visits wire.processes",
    "__main__": "command",
}


def modules() -> dict[str, Path]:
    """Each module by its name without `nbdist.`; the package itself has none."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of nbdist that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = imported_names(node)
        if isinstance(node, ast.ImportFrom):
            names = [name if name.removeprefix("nbdist.") in known else node.module or "" for name in names]
        yield from (name.removeprefix("nbdist").lstrip(".") for name in names if name.split(".")[0] == "nbdist")


def imported_names(node: ast.AST) -> list[str]:
    """What a statement imports, by full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def room_of(module: str, known: dict[str, Path]) -> str:
    if module and known[module].name != "__init__.py" and "." in module:
        module = module.rpartition(".")[0]
    return module or "nbdist"


@functools.cache
def arrows() -> set[tuple[str, str]]:
    known = modules()
    imports = [(module, other) for module, path in known.items() for other in imported(path, known)]
    pairs = {(room_of(module, known), room_of(other, known)) for module, other in imports}
    return {(room, other) for room, other in pairs if room not in (other, "nbdist")}


def allowed() -> set[tuple[str, str]]:
    return {(room, other) for room, others in ALLOWED.items() for other in others.split()}


def test_every_import_is_allowed() -> None:
    lent = {(room, other) for room, other in arrows() if other in SHARED}
    assert sorted(arrows() - lent - allowed()) == []


def test_nothing_is_allowed_that_nobody_needs() -> None:
    assert sorted(allowed() - arrows()) == []


def test_what_all_share_imports_nothing_else() -> None:
    assert [(room, other) for room, other in sorted(arrows()) if room in SHARED and other not in SHARED] == []


def test_what_is_allowed_has_no_circle() -> None:
    graph = {room: set(others.split()) for room, others in ALLOWED.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(ALLOWED)


def test_no_file_imports_itself_through_others() -> None:
    known = modules()
    graph = {module: set(imported(path, known)) - {module} for module, path in known.items()}
    assert circle_in(graph) == []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The members of a circle, from the first to itself; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_lower_lines_of_the_table_import_from_higher_ones() -> None:
    place = {room: number for number, room in enumerate(ALLOWED)}
    assert [(room, other) for room, other in allowed() if place[other] >= place[room]] == []


def test_a_room_has_a_few_files_and_more_than_one() -> None:
    files: defaultdict[str, int] = defaultdict(int)
    for path in modules().values():
        files[str(path.parent.relative_to(PACKAGE))] += 1
    few = {room: count for room, count in files.items() if not 2 <= count <= 12 and not any_room_in(room)}
    assert few == {}


def any_room_in(folder: str) -> bool:
    """Whether a folder has rooms and nothing of its own."""
    inside = list((PACKAGE / folder).iterdir())
    return [path.name for path in inside if path.suffix == ".py"] == ["__init__.py"]


def test_no_two_modules_have_the_same_name() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for module, path in modules().items():
        counts[module.rpartition(".")[2]] += path.name != "__init__.py"
    assert sorted(name for name, count in counts.items() if count > 1) == []


def test_no_two_public_classes_have_the_same_name() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for path in modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                counts[node.name] += 1
    assert sorted(name for name, count in counts.items() if count > 1) == []


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("nbdist", {"benchmarks", "scripts", "testbed", "tests"}),
        ("testbed", {"benchmarks", "tests"}),
        ("benchmarks", {"tests"}),
        ("tests", {"benchmarks"}),
    ],
)
def test_a_folder_does_not_import_those_that_use_it(folder: str, others: set[str]) -> None:
    """Nor does the code in its strings, which kernels and ranks run."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {(str(path.relative_to(ROOT)), name) for path in paths for name in top_packages(path.read_text())}
    assert paths and sorted(pair for pair in found if pair[1] in others) == []


def top_packages(source: str) -> set[str]:
    """The packages that a source imports, in the strings that it contains too."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    code = {name for text in texts for name in re.findall(r"^\s*(?:from|import) +(\w+)", text, re.MULTILINE)}
    return code | {name.partition(".")[0] for node in nodes for name in imported_names(node)}


@pytest.mark.parametrize(
    "source", ["import tests.x", "def f():\n from tests import x", "cell = 'x\\n from tests.x import y'"]
)
def test_an_import_is_seen_wherever_it_is(source: str) -> None:
    assert "tests" in top_packages(source)

"""`nbdist export`: reads a notebook, writes the script, and says what is not as in the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.export.script_text import batch_text, command, script_text
from nbdist.export.source.notebook_file import read_notebook
from nbdist.export.whole_notebook import draft_of


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: The script, and the batch script if there is one.
        command: What runs it.
        notes: What is not as in the notebook, each with its cell.
    """

    files: list[Path]
    command: str
    notes: list[str]


def export(
    notebook: Path, script: Path, *, as_run: bool = False, sbatch: bool = False, force: bool = False
) -> Exported:
    """Write a notebook as a script for torchrun.

    Args:
        notebook: The notebook.
        script: Where to write the script.
        as_run: Whether cells are in the order in which they were run last; otherwise in the notebook's.
        sbatch: Whether to write a batch script for Slurm beside it, with the suffix `.sbatch`.
        force: Whether existing files are overwritten.

    Raises:
        UsageError: The notebook can't be read, or a file can't be written. Nothing was written.
    """
    cells = read_notebook(notebook)
    batch = script.with_suffix(".sbatch")
    files = [script, batch] if sbatch else [script]
    _check_files(notebook, files, force)
    draft, remarks = draft_of(cells, as_run=as_run)
    texts = [script_text(draft, notebook.name, script.name, remarks)]
    if sbatch:
        if draft.start is None:
            raise UsageError(
                f"{notebook} starts no ranks with `%distributed start`, so there is nothing to submit: "
                "leave out --sbatch"
            )
        texts.append(batch_text(draft.start, script.name, batch.name))
    for file, text in zip(files, texts, strict=True):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{file} can't be written ({error.strerror})") from None
    return Exported(files, command(draft.start, script.name), draft.notes)


def _check_files(notebook: Path, files: Sequence[Path], force: bool) -> None:
    for file in files:
        if file.suffix == ".ipynb":
            raise UsageError(f"{file} would be a notebook: name a script, such as {notebook.stem}.py")
        if not file.parent.is_dir():
            raise UsageError(f"{file} can't be written: there is no folder {file.parent}")
        if file.is_dir():
            raise UsageError(f"{file} is a folder: name a file in it, such as {file / (notebook.stem + '.py')}")
        if file.exists() and not force:
            raise UsageError(f"{file} exists already: pass --force to overwrite it")

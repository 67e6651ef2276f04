"""nbclient's client, which also shows what cells print at once, and asks at the end what the ranks have needed."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from nbdist.program.costs import ProgramCosts

_COSTS = "__import__('nbdist.program.notebook_costs', fromlist=['costs']).costs()"
_TEXT = "text/plain"


def make_client(nbclient: ModuleType, content: Any, folder: Path) -> Any:
    """Return a client for a notebook. Its attribute `spent` has what the ranks that were there at its end have needed.

    Args:
        nbclient: The package, which may be missing elsewhere.
        content: The notebook.
        folder: Where its kernel runs.
    """

    class Client(nbclient.NotebookClient):  # type: ignore[misc,name-defined]  # its type is not known here
        spent: list[ProgramCosts] = []  # noqa: RUF012  # replaced, never changed

        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            _show(msg["msg_type"], msg["content"])
            return super().process_message(msg, cell, cell_index)

        async def async_execute_cell(self, cell: Any, cell_index: int, **keywords: Any) -> Any:
            done = await super().async_execute_cell(cell, cell_index, **keywords)
            if cell_index == len(self.nb.cells) - 1:
                self.spent = await self._ask_costs()
            return done

        async def _ask_costs(self) -> list[ProgramCosts]:
            asked = self.kc.execute("", silent=True, user_expressions={"spent": _COSTS})
            reply = await self.async_wait_for_reply(asked)
            answer = ((reply or {}).get("content", {}).get("user_expressions") or {}).get("spent", {})
            if answer.get("status") != "ok":
                return []
            return [ProgramCosts(*each) for each in json.loads(ast.literal_eval(answer["data"][_TEXT]))]

    resources = {"metadata": {"path": str(folder)}}
    return Client(content, timeout=None, kernel_name="python3", resources=resources)


def _show(kind: str, content: dict[str, Any]) -> None:
    """Print an output as it comes. One that is shown again as it changes, such as a bar, is printed once."""
    if kind == "stream":
        stream = sys.stderr if content["name"] == "stderr" else sys.stdout
        print(content["text"], end="", flush=True, file=stream)
    elif kind in ("execute_result", "display_data") and _TEXT in content.get("data", {}):
        print(content["data"][_TEXT], flush=True)

"""What a page shows of text that moves the cursor."""

from __future__ import annotations


def screen(text: str) -> list[str]:
    """The lines that a page shows for text with carriage returns and backspaces."""
    lines = []
    for line in text.split("\n"):
        shown: list[str] = []
        column = 0
        for character in line:
            if character == "\r":
                column = 0
            elif character == "\b":
                column -= 1
                del shown[column]
            else:
                shown[column : column + 1] = character
                column += 1
        lines.append("".join(shown).rstrip())
    return [line for line in lines if line]

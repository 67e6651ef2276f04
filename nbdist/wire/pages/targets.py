"""What pages name to reach the kernel's end of their lines. Loads nothing: each notebook offers them at once."""

PAGE_TARGET = "nbdist.page"
PANEL_TARGET = "nbdist.panel"  # a widget's own, by which it is heard while a cell runs

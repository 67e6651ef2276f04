"""What kernels and Jupyter servers say to pages, and pages to them. Independent of how it travels.

page_messages     a notebook's page and its kernel
panel_messages    the panel of ranks, on that line or as a widget
machine_messages  a page and the Jupyter server
targets           the names of the lines

`scripts/check --fix` makes labextension/src/generated/wire.ts of these, by scripts/page_types.py.
"""

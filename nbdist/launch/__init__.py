"""Launching a function on ranks of its own, from the notebook: what `nbdist.launcher` is made of.

`request` is what was asked, checked. `on_ranks` runs it on ranks of its own; `fork` has the notebook fork them, `nodes`
runs it together with other nodes. `in_process` runs it in the notebook itself. They share the request and the errors.
"""

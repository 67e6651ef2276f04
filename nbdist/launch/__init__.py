"""Launching a function on its own ranks, from the notebook: the parts of `nbdist.launcher`.

`request` is the checked request. `on_ranks` runs it on its own ranks; `fork` has the notebook fork them, `nodes` runs
it together with other nodes. `in_process` runs it in the notebook itself. They share the request and the errors.
"""

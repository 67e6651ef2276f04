"""Launching a function on ranks of its own, from the notebook: what `nbdist.launcher` is made of.

`request` is what was asked, checked; `warm` runs it on ranks from a template; `forked` on `children` of the notebook
itself, each a `forked_rank`; `in_process` in the notebook itself; `elastic` together with other nodes, which find each
other by `nodes` and hear of each other by `pulse`. They share the request, the errors, and how a launch is concluded.
"""

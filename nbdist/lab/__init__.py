"""What JupyterLab's pages reach in a kernel: nbdist's side of the extension in `labextension/src/lab`.

What goes over the lines is in `nbdist.wire.pages`.

page_actions.py   what buttons do, also while a cell runs
variable_rows.py  variables of ranks for a page
cells_seen.py     where cells ran, what failed there, and the step of a running cell's loop
state_watch.py    the session's state, told when it changes
lines.py          the comms that pages open
kernel_status.py  "busy" while a cell runs, also when these comms are answered meanwhile

Apart from the note of each cell on ranks, nothing here runs unless a page asks for something.
"""

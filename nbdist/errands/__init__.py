"""What others than this process's user want from its session: to run cells there, and to look at it.

An agent's server (`nbdist mcp`) asks, by the session's controller; a notebook's kernel does it, beside its own cells.

errand_desk.py   takes errands and answers each
cell_records.py  what is known of each cell, whoever has started it
queued_cells.py  cells that wait for their ranks
transcripts.py   what cells have printed, page by page
errand_offer.py  has this process do errands
"""

"""How other machines become nodes of a session.

    join       this machine becomes one: `nbdist join`
"""

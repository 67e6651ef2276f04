"""How other machines become nodes of a session.

joining    this machine becomes one: `nbdist join`
"""

"""How other machines become nodes of a session.

joining    this machine becomes one: `nbdist join`
doctor     whether it could, and what would fail: `nbdist doctor`
"""

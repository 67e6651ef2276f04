"""Gradients that FSDP2 has gathered but not exchanged yet: whoever gives a step up has to drop them.

Leans on private parts of torch, as there is no public way. Imports nothing of it.
"""

from __future__ import annotations

from typing import Any


def parameter_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of one FSDP2 module, by its state; newer torches may have several."""
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def drop_unexchanged(group: Any) -> None:
    """Drop what a group's parameters have gathered since their gradients were last exchanged."""
    for parameter in group.fsdp_params:
        if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None

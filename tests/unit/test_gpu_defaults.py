"""What ranks on GPUs find in their environment."""

from __future__ import annotations

import pytest

from nbdist.worker.groups.join import ALLOCATOR_VARIABLES, gpu_defaults

KERNEL = "6.8.0-generic"


def test_a_variable_of_the_user_s_stays() -> None:
    for name, setting in gpu_defaults({}, KERNEL).items():
        assert name not in gpu_defaults({name: f"not {setting}"}, KERNEL)


def test_an_older_name_of_a_variable_counts_too() -> None:
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in gpu_defaults({}, KERNEL)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in gpu_defaults({"NCCL_ASYNC_ERROR_HANDLING": "1"}, KERNEL)


@pytest.mark.parametrize("name", [*ALLOCATOR_VARIABLES, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"])
def test_whoever_has_set_up_the_allocator_keeps_it(name: str) -> None:
    assert "expandable_segments:True" in gpu_defaults({}, KERNEL).values()
    assert "expandable_segments:True" not in gpu_defaults({name: "1"}, KERNEL).values()


def test_segments_do_not_grow_where_the_driver_can_not_let_them() -> None:
    assert "expandable_segments:True" not in gpu_defaults({}, "5.15.153.1-microsoft-standard-WSL2").values()

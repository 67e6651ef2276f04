"""Copies for a checkpoint: what is written is what was there, in memory that is used again."""

from __future__ import annotations

import torch

from nbdist.train.checkpoint.saving import copy_to_cpu


def test_copies_stay_as_they_are_when_the_originals_change() -> None:
    tensors = {"weight": torch.arange(4.0), "step": torch.tensor(3)}
    copies: dict[str, torch.Tensor] = {}
    copy_to_cpu(tensors, copies)
    tensors["weight"].add_(1)
    assert copies["weight"].tolist() == [0, 1, 2, 3] and copies["step"].item() == 3


def test_a_second_copy_goes_where_the_first_went() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    copies: dict[str, torch.Tensor] = {}
    copy_to_cpu({"weight": weight}, copies)
    place = copies["weight"].data_ptr()
    weight.data.fill_(2)
    copy_to_cpu({"weight": weight}, copies)
    assert copies["weight"].data_ptr() == place and copies["weight"].tolist() == [2] * 4


def test_a_tensor_of_another_shape_or_type_gets_a_copy_of_its_own() -> None:
    copies: dict[str, torch.Tensor] = {}
    for tensor in (torch.zeros(4), torch.zeros(5), torch.zeros(5, dtype=torch.float16), torch.zeros(5, 1)):
        copy_to_cpu({"weight": tensor}, copies)
        assert copies["weight"].shape == tensor.shape and copies["weight"].dtype == tensor.dtype


def test_what_is_no_longer_saved_is_not_kept() -> None:
    copies: dict[str, torch.Tensor] = {}
    copy_to_cpu({"old": torch.zeros(4), "weight": torch.zeros(4)}, copies)
    copy_to_cpu({"weight": torch.zeros(4)}, copies)
    assert list(copies) == ["weight"]


def test_an_original_that_is_not_contiguous_keeps_its_values() -> None:
    copies: dict[str, torch.Tensor] = {}
    copy_to_cpu({"weight": torch.arange(6).view(2, 3).t()}, copies)
    assert copies["weight"].tolist() == [[0, 3], [1, 4], [2, 5]]

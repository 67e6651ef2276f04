"""Which build of torch a test needs."""

from __future__ import annotations

import pytest
import torch

cpu_torch = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a stand-in for GPUs that this torch would try")

"""Private names of other packages that nbdist uses, by what a session lacks without them.

All of them, with what each is for: docs/compatibility.md.

Each as `tests/support/without/sitecustomize.py` takes it: "a.module", "a.module:attribute", "a.module:Class.attribute".
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_HERE = Path(__file__).parent / "without"
_ROOT = Path(__file__).resolve().parents[2]

_DDP = "torch.nn.parallel:DistributedDataParallel"

# Nothing that a plain session shows.
UNNOTICED = (
    "IPython.core.compilerop:CachingCompiler._filename_map",
    "IPython.core.interactiveshell:InteractiveShell._inspect",
    "IPython.core.interactiveshell:InteractiveShell._object_find",
    "multiprocessing.forkserver:_forkserver",
    "multiprocessing.process:_children",
    "multiprocessing.resource_tracker:_resource_tracker",
    "torch:_foreach_lerp_",
    "torch._C:_cuda_getDeviceCount",
    "torch._C:_cuda_hasPrimaryContext",
    "torch._C:_cuda_isInBadFork",
    "torch._C:_dynamo",
    "torch._dynamo",
    "torch._functorch",
    "torch._subclasses",
    "torch.cuda:_is_in_bad_fork",
    "torch.cuda:_queued_calls",
    "torch.distributed:_broadcast_coalesced",
    "torch.distributed:_register_comm_hook",
    "torch.distributed:ProcessGroupGloo._get_sequence_number_for_group",
    "torch.distributed:ProcessGroupGloo._set_default_timeout",
    "torch.distributed._composable_state",
    "torch.distributed._tools",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed.distributed_c10d:_update_default_pg",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.rendezvous:_rendezvous_handlers",
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.placement_types:_StridedShard",
    "torch.nn.modules.batchnorm:_BatchNorm",
    "torch.optim:Optimizer._step_supports_amp_scaling",
    "torch.profiler._cupti_monitor",
    "torch.testing._internal",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils._pytree",
    "torch.utils.data._utils",
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    f"{_DDP}._ddp_init_helper",
    f"{_DDP}._get_ddp_logging_data",
    f"{_DDP}._set_ddp_runtime_logging_sample_rate",
    f"{_DDP}._update_process_group",
)
# Time and FLOPs of steps.
UNMEASURED = (
    "torch._C:_autograd",
    "torch._C:_current_autograd_node",
    "torch._C:_current_graph_task_id",
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "torch._C:_get_dispatch_stack_at",
    "torch._C:_len_torch_dispatch_stack",
    "torch._ops",
    "torch.autograd:_engine_run_backward",
    "torch.utils._contextlib",
    "torch.utils._python_dispatch",
)
# Process groups that go on after an interrupt of a collective.
UNRENEWED = (
    "torch.distributed:ProcessGroup._device_types",
    "torch.distributed:ProcessGroup._get_backend",
    "torch.distributed:ProcessGroup._register_backend",
    "torch.distributed:ProcessGroup._set_group_desc",
    "torch.distributed:ProcessGroup._set_group_name",
    "torch.distributed:ProcessGroupGloo._set_sequence_number_for_group",
)
# An interrupt of a collective.
UNFREED = (
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    "torch.distributed.distributed_c10d:_world",
)


def without(names: Collection[str]) -> dict[str, str]:
    """Variables for a kernel in which nbdist, and its ranks, find none of these names."""
    return {
        "PYTHONPATH": os.pathsep.join([str(_HERE), str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "NBDIST_TESTS_WITHOUT": " ".join(names),
    }

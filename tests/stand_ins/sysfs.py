"""Where GPUs and cores lie, as Linux says in /sys.

`numa_node` is a number, -1 where the firmware does not tell (Documentation/ABI/testing/sysfs-bus-pci); `cpulist` is as
in Documentation/ABI/stable/sysfs-devices-node; `thread_siblings_list` names the hyperthreads of a core, itself among
them (Documentation/admin-guide/cputopology.rst), often n and n + half of all. Containers may hide all of this:
there are no such files then.
"""

from __future__ import annotations

from pathlib import Path


def gpu(folder: Path, address: str, node: int) -> None:
    """A device at this address of the PCI bus, on a NUMA node."""
    device = folder / "bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")


def node(folder: Path, number: int, cores: str) -> None:
    """A NUMA node with these cores: "4-6,12"."""
    found = folder / f"devices/system/node/node{number}"
    found.mkdir(parents=True)
    (found / "cpulist").write_text(f"{cores}\n")


def core(folder: Path, threads: list[int]) -> None:
    """A physical core with these hyperthreads."""
    for number in threads:
        found = folder / f"devices/system/cpu/cpu{number}/topology"
        found.mkdir(parents=True)
        (found / "thread_siblings_list").write_text(f"{','.join(map(str, threads))}\n")

"""The engines that come with nbdist: where each one's class is, what it calls itself, and its flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a flag takes: nothing, a text, names with commas between, folders of this machine likewise, or a number.
FlagKind = Literal["switch", "text", "names", "folders", "number"]


@dataclass(frozen=True)
class ClusterFlag:
    """A flag of `%distributed start`.

    Attributes:
        option: The option of the engine that it sets; the flag has hyphens in place of underscores.
        help: One line, with the kinds of cluster that it is for.
        metavar: Stands for its value in the list of flags.
        otherwise: Its value if none is given after it; "": one must be.
    """

    option: str
    help: str
    metavar: str = ""
    kind: FlagKind = "text"
    otherwise: str = ""

    @property
    def name(self) -> str:
        """As users type it."""
        return f"--{self.option.replace('_', '-')}"


@dataclass(frozen=True)
class OwnEngine:
    """An engine.

    Attributes:
        target: Its module and class.
        title: What it calls itself.
        flag: Chooses it. If it takes a value, `option` has that.
        option: The option that has the value of `flag`; "": it takes none.
        example: How to choose it, in an error.
        flags: For its options. One that several engines have is listed with the first.
    """

    target: str
    title: str
    flag: ClusterFlag
    example: str
    option: str = ""
    flags: tuple[ClusterFlag, ...] = ()


def _as_for_sbatch(option: str, metavar: str, example: str = "") -> ClusterFlag:
    return ClusterFlag(option, f"with --slurm, as for sbatch{example}", metavar)


OWN_ENGINES = {
    "ssh": OwnEngine(
        "nbdist.cluster.engines.ssh:Ssh",
        "ssh",
        ClusterFlag("hosts", "use these machines, through ssh: node-a,node-b:4,user@node-c", "LIST", "names"),
        "--hosts node-a",
        "hosts",
        (
            ClusterFlag("ssh_config", "with --hosts: file to use instead of ~/.ssh/config", "FILE"),
            ClusterFlag("tunnel", "with --hosts: send the session's own connections through ssh", kind="switch"),
            ClusterFlag("sync", "with --hosts: folders to copy there first, for example src,lib", "LIST", "folders"),
            ClusterFlag("python", "path of Python on the other machines (default: the same as here)", "PATH"),
        ),
    ),
    "slurm": OwnEngine(
        "nbdist.cluster.engines.slurm:Slurm",
        "Slurm",
        ClusterFlag("slurm", "use nodes of a Slurm cluster; --num-nodes says how many", kind="switch"),
        "--slurm",
        flags=(
            _as_for_sbatch("partition", "NAME"),
            _as_for_sbatch("account", "NAME"),
            _as_for_sbatch("time", "LIMIT", ", for example 2:00:00"),
            _as_for_sbatch("gres", "LIST", ", for example gpu:8"),
            _as_for_sbatch("constraint", "LIST"),
        ),
    ),
    "ray": OwnEngine(
        "nbdist.cluster.engines.ray:Ray",
        "Ray",
        ClusterFlag("ray", "use nodes of a Ray cluster; --num-nodes says how many", "ADDRESS", otherwise="auto"),
        "--ray",
        "address",
        (ClusterFlag("gpus_per_node", "with --ray (default: all) and --kubernetes (none)", "G", "number"),),
    ),
    "kubernetes": OwnEngine(
        "nbdist.cluster.engines.kubernetes:Kubernetes",
        "Kubernetes",
        ClusterFlag("kubernetes", "use pods of a Kubernetes cluster; --num-nodes says how many", kind="switch"),
        "--kubernetes",
        flags=(
            ClusterFlag("image", "with --kubernetes: image for the pods, which must contain nbdist", "NAME"),
            ClusterFlag(
                "volumes", "with --kubernetes: volume claims and where to mount them: data:/data", "LIST", "names"
            ),
            ClusterFlag("namespace", "with --kubernetes (default: kubectl's)", "NAME"),
        ),
    ),
}

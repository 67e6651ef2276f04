"""How other machines become nodes of a session.

joining    this machine becomes one: `nbdist join`
launchers  what torchrun, srun, mpirun have set where they start that
folding    one process for each node, where they start several
doctor     whether it could, and what would fail: `nbdist doctor`
starter    the process that has other machines run that, by an engine
engines/   what an engine is, and how it is found: ssh, slurm, others; what they run and what goes there first
cluster_profiles   options by name
"""

"""The processes of a run on other hosts.

    the run                                             a host
    RemoteHost --say(items), hear() -- ray --> Agent -- lines --> engines, the trainer's processes
    Spread     --take -- ray --> HostWeights <-- WeightPort of the trainer's host, and of others

Only `ray_*.py` import ray, for the agents of a run and for a process's one connection; the mailbox
and the jobs of a cluster of many runs are in `cluster/on_ray/`. Ray knows the hosts, reserves their
devices, starts one agent on each and carries its calls. It restarts and repeats nothing, since what
follows a loss is the core's decision.
"""

"""The processes of a run on other hosts.

The run's `RemoteHost` calls, through ray, `say` and `hear` of the `Agent` on the host, which talks
to engines and trainer processes there over lines (sockets). For weights, the run's `Spread` calls
`HostWeights` on the host, which receives them from the `WeightPort` of another host.

Only `ray_*.py` import ray, for the agents of a run and for a process's one connection; the mailbox
and the jobs of a cluster of many runs are in `cluster/on_ray/`. Ray knows the hosts, reserves their
devices, starts one agent on each and carries its calls. It restarts and repeats nothing, since the
run itself decides what follows a loss.
"""

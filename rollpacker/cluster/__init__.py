"""Jobs that share pools of devices, really: what `core/cluster.py` decides is done here.

    a job                                                  the service
    controller or `phase` -> Seat --- letters: Mailbox --- Service -> core/cluster.py
      enter, leave, committed                                 |  its events: Store (SQLite)
                                                              v
                                                            Runner: starts jobs, stops them

The service may die at any moment, and so may a job: letters and events outlive both. What they talk
through (a file on one host, an actor behind ray) and who starts a job (this host, ray) are one
protocol each.
"""

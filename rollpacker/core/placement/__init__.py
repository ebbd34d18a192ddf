"""Which device does what: engines, training replicas and a judge, on the devices of all hosts."""

"""Several jobs on the same pools of devices: one generates while another trains."""

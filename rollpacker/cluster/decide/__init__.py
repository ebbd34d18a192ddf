"""Decides which jobs share which nodes, and when: one job generates while another trains."""

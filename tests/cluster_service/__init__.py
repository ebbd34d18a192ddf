"""The cluster's service without ray: letters, leases, processes of this host."""

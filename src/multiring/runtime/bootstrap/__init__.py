"""Bootstrap of a job: the variables of launchers, addresses, and the rendezvous of the ranks."""

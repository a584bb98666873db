"""Find what is wrong with the hosts and links of a job, for `multiring doctor`."""

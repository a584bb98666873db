"""Bootstrap of a job: launchers' variables, addresses, and the rendezvous."""

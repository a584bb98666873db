"""How the ranks of a job find each other: what the launcher says, addresses, the rendezvous."""

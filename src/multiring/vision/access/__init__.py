"""Who may reach a server of this machine: loopback addresses, and files of tokens."""

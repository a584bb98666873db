"""The rails of a rank, how they fare, and what is known of the topology."""

"""Where the time goes: the share of this machine's peak, what bounded the training, and its steps in the timeline."""

"""Large-batch optimizers LARS, LARC, LAMB and Muon, and their parameter groups."""

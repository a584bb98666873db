"""Optimizers for large batches: LARS, LARC, LAMB and Muon, and the parameters that they treat apart."""

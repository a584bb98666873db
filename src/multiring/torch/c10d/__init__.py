"""torch.distributed's backend "multiring": `torch.distributed.init_process_group("multiring")`."""

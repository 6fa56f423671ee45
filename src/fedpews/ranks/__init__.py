"""One federation over several processes, machines or GPUs: `torchrun ... -m fedpews run CONFIG`."""

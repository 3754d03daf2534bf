"""A device that stands in for CUDA: PyTorch's PrivateUse1 in memory of the host, where every wait
is counted."""

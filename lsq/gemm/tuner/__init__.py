"""Makes files of tuned products: which ways there are on a GPU, and which is fastest."""

"""Makes files of tuned products: tries the ways to run a product on a GPU, keeps the fastest."""

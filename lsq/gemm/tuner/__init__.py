"""Makes files of tuned products: finds the ways to run a product on a GPU, and the fastest of
them."""

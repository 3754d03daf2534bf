"""Everything that processes say to each other."""

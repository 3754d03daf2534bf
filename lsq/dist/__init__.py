"""What processes say to each other: so far, that a signal came."""

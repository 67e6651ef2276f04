"""How processes find each other, before there is a socket between them."""

"""Ranks that take the places of dead ones, and sessions of more or fewer ranks."""

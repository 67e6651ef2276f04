"""What every room may use: text, checks, limits, ranks as text, processes, addresses. Imports no other room."""

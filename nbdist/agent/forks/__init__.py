"""The warm template, and the processes that are forked from it."""

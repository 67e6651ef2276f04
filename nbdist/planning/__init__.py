"""What stands behind `nbdist.plan`: settings, rules, words and variables. Knows nothing of torch, ranks or notebooks."""

"""What stands behind `nbdist.plan`: rules, words and variables. Knows nothing of torch, ranks or notebooks."""

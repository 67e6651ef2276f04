"""What `nbdist.plan` is made of: settings, rules, words and variables. Imports nothing of torch, ranks or notebooks."""

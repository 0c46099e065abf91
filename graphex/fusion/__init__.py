"""Fusion by rule: idioms are lifted to named ops, named ops are fused, and every miss has a reason.

    calls -> patterns -> rule -> matching -> splice -> fuse

Read it in this order: `calls` (one spelling for each call), `patterns` (one try at one node), `tracing` and `rule`
(patterns from functions), `matching` (everything that must hold besides), `splice` (the replacement in its place),
`fuse` (all rules to a fixed point, and the reasons). `mismatch` says where and why a match ended, `register` is how a
user adds a rule, `self_test` tries it out, `ranks` makes it fit other ranks than its example has, and `rules/` has
graphex's own.

`registry` and `rules/__init__` are light and always loaded. The matcher (torch's, with our patterns on top) and a
family of rules are loaded when a graph holds an op that the family is about.
"""

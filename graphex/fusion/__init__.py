"""Fusion by rule: idioms are lifted to named ops, named ops are fused, and every miss has a reason.

    calls -> patterns -> rule -> matching -> fuse

Read it in this order: `calls` (one spelling for each call), `patterns` (one try at one node, where and why it ended),
`rule` (patterns from traced functions), `matching` (everything that must hold besides), `fuse` (the replacement in its
place, all rules to a fixed point, and the reasons). `register` is how a user adds a rule, for the ranks of its example
and for others, `self_test` tries it out, and `rules/` has graphex's own.

`rules/__init__` is light and always loaded. The matcher (torch's, with our patterns on top) and a family of rules are
loaded when a graph holds an op that the family is about.
"""

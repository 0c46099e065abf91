"""Fusion by rule: idioms are lifted to named ops, named ops are fused, and every miss has a reason.

`registry` and `catalogue` are light and always loaded; the matcher (torch's, with our patterns on top) and the rule
families are loaded when a graph holds an op that one of them is about.
"""

"""Names torch does not promise to keep, one module for each part of torch. A torch upgrade starts here.

Nothing else in graphex uses a private torch name, imported or as an attribute, but for the classes of `torch._ops` and
the few attributes that `tests/torch_private/test_lookup.py` lists with a reason. Read `lookup` first: how a name
is looked up, what serves in its place and what is lost without it, how a function of torch is replaced in one thread,
and which versions of torch were tried. Then, in the order of a compilation: `dynamo`, `frames`, `aot`, `symbolic`,
`graphs`, `patterns`, `inductor` (which imports the matcher behind `patterns`), `memory`, `cuda`. `ahead` is for models
that are saved, `npu` for the simulated one.
"""

"""Names torch does not promise to keep, one module per part of torch.

A torch upgrade starts here: nothing else in graphex uses a private torch name. `lookup` is how each is looked up, and
`versions` says which versions of torch were tried.
"""

"""Names torch does not promise to keep, one module per part of torch.

A torch upgrade starts here: nothing else in graphex imports a private torch name.
"""

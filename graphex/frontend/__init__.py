"""From Dynamo's graph to ATen graphs: the decomposition table and the AOTAutograd call."""

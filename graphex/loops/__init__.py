"""Programs around compiled graphs: they call a graph again and again, or ahead of time.

    warm_up      captures the device graphs of example calls before the calls that matter
    saved        a compiled model as one file, called by another process without Dynamo
    replayer     one captured call, repeated without Dynamo and AOTAutograd around it

The first and the last run calls while their thread warms up (`runtime.program.warming_up`).
"""

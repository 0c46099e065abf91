"""Evidence: views of the journal (explain, debug files, traces) and the checks behind it (verify, repro, data dump)."""

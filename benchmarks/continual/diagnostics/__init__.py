"""What explains a run's numbers: each module reads a finished run and measures one thing."""

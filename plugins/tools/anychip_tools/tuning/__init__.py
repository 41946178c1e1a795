"""Search for settings by trial: the next trial within a budget, and the run of a trial.

Must not change how a service serves: it starts services by the command, and stores what it found.
"""

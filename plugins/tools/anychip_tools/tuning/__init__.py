"""Settings found by trial: what to try next within a budget, and what a trial is.

Must not change how a service serves: it starts services by the command, and stores what it found.
"""

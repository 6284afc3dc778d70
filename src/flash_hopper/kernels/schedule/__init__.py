"""The prepare kernel of a ragged batch: the table of `plan/schedule.py`."""

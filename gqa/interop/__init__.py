"""Other people's checkpoints, in and out: `python -m gqa.interop`."""

"""Checkpoints to fewer KV heads (Ainslie et al. 2023, section 2.1, and after).

`heads` holds the weights of a layer and what may be done to them without
changing the model; `grouping` decides which KV heads become one, `merging`,
`alignment` and `low_rank` how; `calibrate` takes the model through a text,
`layers` converts it layer by layer, and `python -m gqa.convert` is the command.
"""

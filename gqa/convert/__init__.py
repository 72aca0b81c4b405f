"""Checkpoints to fewer KV heads (Ainslie et al. 2023, section 2.1, and after).

One layer: `heads` holds its weights and what may be done to them without
changing the model; `grouping` decides which KV heads become one, `merging`,
`alignment` and `low_rank` how, and `methods` is their table. The model:
`layers` runs a layer by itself, `calibrate` reads a text through them, `refit`
and `reconstruct` repair what a merge has lost, and `walk` goes through all
layers. `disguise` makes what a converter should undo. `checkpoints` goes from
workdir to workdir, `budget` divides a cache over layers, and `python -m
gqa.convert` is the command.
"""

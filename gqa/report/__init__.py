"""Runs, sweeps, conversions and benchmarks as tables and plots.

`read` finds what lies below a directory; `recipes` and `join` tie it together
by recorded fields. `series` and `decode_series` give the rows of each plot,
which `quality` and `decoding` draw (`plots` lists them), and `quality_tables`,
`cost_tables` and `inventory` lay out tables. `page` makes HTML and Markdown of
both, and `board` puts them into TensorBoard.
"""

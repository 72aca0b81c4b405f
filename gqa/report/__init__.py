"""Runs, sweeps, conversions and benchmarks as tables and plots.

`read` finds what lies below a directory, `series` joins it by recorded fields
and gives the rows of every table and plot, `tables` and `plots` lay them out,
`page` makes HTML and Markdown of both, and `board` puts them into TensorBoard.
"""

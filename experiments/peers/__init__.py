"""Cells of gqa.benchmark on other systems; decode_peers.py is their process."""

"""Grouped-query attention: train, convert, decode and measure."""

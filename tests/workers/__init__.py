"""Strategies over several processes: real ones, joined by gloo."""

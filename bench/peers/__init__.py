"""Servers to compare with: the same JSON work on other stacks, without any limit."""

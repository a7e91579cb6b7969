"""Tidegate: a rate limiter whose every process decides from its own memory."""

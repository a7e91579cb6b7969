"""What the server is measured against: the same JSON work on other stacks, limiting nothing."""

"""The page on which people label a project's pictures."""

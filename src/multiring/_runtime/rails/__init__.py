"""The rails of a rank: their choice, their speed, and topology files."""

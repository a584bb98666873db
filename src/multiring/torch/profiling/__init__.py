"""Profile the steps of a program that trains with torch, without a change of the program; for `multiring profile`."""

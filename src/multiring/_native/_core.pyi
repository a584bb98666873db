"""multiring's compiled core; import it through multiring._native."""

VERSION: str = "0.1.0"

"""Groups: the ranks that do collectives together, and how one operation is posted, compiled and handled."""

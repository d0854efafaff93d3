"""Files that are whole or absent, and logs whose records name each other."""

"""Which entries a request gets, and with which numbers they enter attention."""

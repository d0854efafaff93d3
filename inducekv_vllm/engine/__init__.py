"""The two passes of a request with memory: the HTTP engine client, the offline helper and what they share."""

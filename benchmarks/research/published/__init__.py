"""The published suites: their files, their scorers as published and as corrected, and what differs.

Facts about the published code are from reading it; nothing of it is copied.
"""

"""How long a version takes to load that shares most of its entries with the one before.

run.py       the command: loads over HTTP, with and without a state folder
contents.py  the bundles
parts.py     where the time goes
"""
